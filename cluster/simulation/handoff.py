"""The sending end of a hand-off without payload, which takes as long as a transfer of its bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.kv_spec import KVCacheSpec
from baton.core.request import Request
from baton.core.timeline import Event, TransferPart
from baton.kv_transfer.base import KVTransport, TransferOffer
from baton.rpc.conversions import pack_parts
from baton.rpc.wire import worker_pb2
from cluster.simulation.profile import TransferCosts

_MAX_PARTS = 16
"""Longer hand-offs report their last parts as one."""


class Uplink:
    """The uplink of a worker, which sends one transfer after the other at the link's rate."""

    def __init__(self, costs: TransferCosts) -> None:
        self._costs = costs
        self._free_s = 0.0
        self.num_bytes_sent = 0

    @property
    def latency_s(self) -> float:
        return self._costs.fixed_ms / 1e3

    def send(self, num_bytes: int, now_s: float) -> float:
        """Sends bytes. Returns the time at which the last of them has left."""
        self.num_bytes_sent += num_bytes
        self._free_s = max(self._free_s, now_s) + num_bytes / self._costs.bytes_per_second
        return self._free_s


@dataclass(frozen=True, slots=True)
class HandoffSummary:
    """The result of a hand-off."""

    num_bytes: int
    num_tokens: int
    num_cached_tokens: int
    seconds: float
    parts: tuple[TransferPart, ...]


class SimulatedHandoff:
    """Hands one prompt over to a decode worker.

    It reserves room when the first chunk is scheduled, and sends each chunk while the next ones are computed.

    Args:
        events: receives the lifecycle events of the hand-off.
    """

    def __init__(
        self,
        transport: KVTransport,
        uplink: Uplink,
        request: Request,
        spec: KVCacheSpec,
        transfer_id: str,
        peer: str,
        reserve_timeout_s: float,
        bytes_per_token: int,
        events: dict[Event, float],
    ) -> None:
        self._transport = transport
        self._uplink = uplink
        self._bytes_per_token = bytes_per_token
        self._num_prompt = request.num_prompt_tokens
        self._offer = TransferOffer(
            transfer_id,
            spec,
            tuple(request.prompt_token_ids),
            reserve_timeout_s,
            cache_salt=request.cache_salt,
        )
        self._peer = peer
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._sent_tokens: int | None = None
        self._num_computed = 0
        self._sent_s = self._started_s = 0.0
        self._parts: list[TransferPart] = []
        self._computed = asyncio.Event()
        self._task: asyncio.Task[HandoffSummary] | None = None

    def computed(self, num_tokens: int, now_s: float) -> None:
        """Reports that ``num_tokens`` of the prompt have KV. The first call, with the cached tokens, reserves room."""
        if self._task is None:
            self._started_s = now_s
            self._task = self._loop.create_task(self._run())
        self._num_computed = num_tokens
        self._push(now_s)
        if num_tokens >= self._num_prompt:
            self._computed.set()

    async def outcome(self) -> worker_pb2.HandoffResult:
        """Waits for the end of the hand-off, and returns its report."""
        if self._task is None:
            raise RuntimeError("a hand-off that never began was awaited")
        try:
            done = await self._task
        except BatonError as error:
            return worker_pb2.HandoffResult(error_code=error.code, error_message=error.message)
        return worker_pb2.HandoffResult(
            num_bytes=done.num_bytes,
            num_parts=sum(part.num_parts for part in done.parts),
            num_tokens=done.num_tokens,
            num_cached_tokens=done.num_cached_tokens,
            seconds=done.seconds,
            parts=pack_parts(done.parts),
        )

    async def close(self) -> None:
        """Aborts the hand-off, unless it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> HandoffSummary:
        self._events[Event.TRANSFER_STARTED] = self._started_s
        stream = await self._transport.open(self._offer, self._peer)
        try:
            self._events[Event.TRANSFER_RESERVED] = self._loop.time()
            cached = min(stream.reservation.num_cached_tokens, self._num_prompt)
            self._sent_tokens = cached
            self._push(self._loop.time())
            await self._computed.wait()
            await asyncio.sleep(max(0.0, self._sent_s + self._uplink.latency_s - self._loop.time()))
            await stream.commit()
        except BaseException:
            await stream.abort()
            raise
        acknowledged_s = self._loop.time()
        self._events[Event.TRANSFER_ACKNOWLEDGED] = acknowledged_s
        num_tokens = self._num_prompt - cached
        return HandoffSummary(
            num_tokens * self._bytes_per_token,
            num_tokens,
            cached,
            acknowledged_s - self._started_s,
            tuple(self._parts),
        )

    def _push(self, now_s: float) -> None:
        if self._sent_tokens is None or self._num_computed <= self._sent_tokens:
            return
        num_bytes = (self._num_computed - self._sent_tokens) * self._bytes_per_token
        self._sent_tokens = self._num_computed
        self._sent_s = self._uplink.send(num_bytes, now_s)
        part = TransferPart(num_bytes, 1, now_s, self._sent_s, self._sent_s + self._uplink.latency_s)
        if len(self._parts) == _MAX_PARTS:
            part = _merged(self._parts.pop(), part)
        self._parts.append(part)


def _merged(first: TransferPart, second: TransferPart) -> TransferPart:
    return TransferPart(
        first.num_bytes + second.num_bytes,
        first.num_parts + second.num_parts,
        first.started_s,
        second.sent_s,
        second.acknowledged_s,
    )
