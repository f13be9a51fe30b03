"""A complete transport between workers of one process, for tests and simulated clusters: same checks, no wire.

It implements :class:`baton.kv_transfer.base.KVTransport` directly. There is no stream, so no path is negotiated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from baton.core.errors import BatonError, TransferError, WorkerLostError
from baton.kv_transfer.base import KVSink, PartBuffer, PartHeader, Payload, Pieces, Reservation, TransferOffer
from baton.kv_transfer.codec import checksum
from baton.kv_transfer.flow import Throttle


class InProcessKVTransport:
    """Implements :class:`baton.kv_transfer.base.KVTransport` over sinks that are registered by address."""

    def __init__(self, sinks: dict[str, KVSink], throttle: Throttle | None = None) -> None:
        self._sinks = sinks
        self._throttle = throttle
        self._streams: weakref.WeakSet[InProcessSendStream] = weakref.WeakSet()

    async def open(self, offer: TransferOffer, peer: str) -> InProcessSendStream:
        sink = self._sinks.get(peer)
        if sink is None:
            raise WorkerLostError(f"no worker at {peer}. Known workers: {', '.join(sorted(self._sinks)) or 'none'}.")
        stream = InProcessSendStream(sink, offer.transfer_id, await sink.reserve(offer), self._throttle)
        self._streams.add(stream)
        return stream

    async def close(self) -> None:
        self._sinks = {}
        for stream in list(self._streams):
            await stream.abort()


class InProcessSendStream:
    """Implements :class:`baton.kv_transfer.base.KVSendStream`."""

    def __init__(self, sink: KVSink, transfer_id: str, reservation: Reservation, throttle: Throttle | None) -> None:
        self._sink = sink
        self._transfer_id = transfer_id
        self._reservation = reservation
        self._throttle = throttle
        self._has_ended = False
        self._num_bytes = 0
        self.on_acknowledged: Callable[[int], None] | None = None

    @property
    def reservation(self) -> Reservation:
        return self._reservation

    def buffer(self, num_bytes: int) -> None:
        """Returns ``None``: the sink reads payloads from any memory."""

    async def send(self, header: PartHeader, payload: Payload | Pieces | PartBuffer) -> None:
        if isinstance(payload, Pieces):
            payload = b"".join(payload.views)
        if not isinstance(payload, Payload):
            raise TransferError("a KV part is in a buffer of a different transport.")
        if self._throttle is not None:
            await self._throttle.take(len(payload))
        self._check_open()
        try:
            await self._sink.write(self._transfer_id, header, memoryview(payload), checksum(payload))
        except BatonError as error:
            self._has_ended = True
            self._sink.abort(self._transfer_id, error.message)
            raise
        self._num_bytes += len(payload)
        if self.on_acknowledged is not None:
            self.on_acknowledged(self._num_bytes)

    async def commit(self, draft_state: bytes | None = None) -> int:
        self._check_open()
        try:
            return await self._sink.commit(self._transfer_id, draft_state)
        except BaseException as error:
            self._sink.abort(self._transfer_id, str(error) or "the sender disconnected")
            raise
        finally:
            self._has_ended = True

    async def abort(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._sink.abort(self._transfer_id, "the sender cancelled the transfer")

    def _check_open(self) -> None:
        if self._has_ended:
            raise TransferError(f"transfer {self._transfer_id} has ended.")
