"""The router's connection to one worker, and the shift between their clocks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc.aio

from cluster.rpc import create_channel, error_from_rpc
from cluster.wire import worker_pb2, worker_pb2_grpc
from engine.errors import BatonError
from engine.timeline import Event, Timeline

_PINGS = 5
_PING_TIMEOUT_S = 5.0
_RESYNC_AFTER_S = 60.0


class WorkerClient:
    """Streams of typed messages; every failure is a ``BatonError``."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = create_channel(address)
        self._prefill = worker_pb2_grpc.PrefillStub(self._channel)
        self._decode = worker_pb2_grpc.DecodeStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerStub(self._channel)
        self._clock_offset_s = 0.0
        self._synced_at_s = float("-inf")

    async def prefill(
        self, request: worker_pb2.PrefillRequest, timeout_s: float
    ) -> AsyncGenerator[worker_pb2.PrefillEvent]:
        """Closing the iterator cancels the call."""
        async for message in self._stream(self._prefill.Prefill(request, timeout=timeout_s)):
            yield message

    async def generate(
        self, request: worker_pb2.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[worker_pb2.TokenBatch]:
        """Closing the iterator cancels the call."""
        async for message in self._stream(self._decode.Generate(request, timeout=timeout_s)):
            yield message

    async def _stream(self, call: Any) -> AsyncGenerator[Any]:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                yield message
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.address) from error
        finally:
            call.cancel()  # nothing happens to a call that is over

    async def stats(self, timeout_s: float = 2.0) -> worker_pb2.WorkerStats:
        """Raises ``BatonError`` when the worker does not answer."""
        try:
            stats: worker_pb2.WorkerStats = await self._worker.GetStats(worker_pb2.StatsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.address) from error
        return stats

    @property
    def needs_sync(self) -> bool:
        return time.monotonic() - self._synced_at_s > _RESYNC_AFTER_S

    async def sync_clock(self) -> None:
        """Measures the worker's clock: of some round trips the fastest, assuming that both ways took equally long.

        Raises:
            BatonError: the worker does not answer.
        """
        self._synced_at_s = time.monotonic()
        best_s = float("inf")
        for _ in range(_PINGS):
            sent_s = time.monotonic()
            try:
                reply = await self._worker.Ping(worker_pb2.PingRequest(), timeout=_PING_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error, self.address) from error
            round_trip_s = time.monotonic() - sent_s
            if round_trip_s < best_s:
                best_s = round_trip_s
                self._clock_offset_s = sent_s + round_trip_s / 2 - reply.monotonic_s

    def record(self, timeline: Timeline, events: Mapping[Event, float]) -> None:
        """Adds a worker's events to a timeline, on this process's clock."""
        for event, at_s in events.items():
            timeline.replace(event, at_s + self._clock_offset_s)

    async def is_alive(self) -> bool:
        try:
            await self.stats()
        except BatonError:
            return False
        return True

    async def close(self) -> None:
        await self._channel.close()
