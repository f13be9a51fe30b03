"""The contract of a payload path: one way for the bytes of parts to reach the receiving worker.

A path is a file with two ends. A worker creates its ends once; each transfer then negotiates its path:

    sending worker                                          receiving worker
    SendPath.offer    describes the path in KVReserve  ──▶  ReceivePath.accept     answers in KVReserved
    SendPath.open     sets the path up                 ◀──
    PartSender.send   sends a part                     ──▶  PartReceiver.receive   writes it to its place

Everything else belongs to ``sender.py`` and ``receiver.py``: the stream, the window, checksums, counts, the commit.
Both workers try their paths in the order of ``transports.py``. The last one uses messages, which always works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from baton.kv_transfer.base import KVSink, PartBuffer, PartHeader, Payload, Pieces
from baton.kv_transfer.codec import copy_summed, encoding_of
from baton.kv_transfer.peer_channels import PeerChannel
from baton.rpc.wire import kv_pb2

Write = Callable[[bytes], Awaitable[None]]
"""Writes a frame to the transfer's gRPC stream. Raises ``BatonError`` when the stream has failed."""


Receive = Callable[[Sequence[memoryview], Callable[[], None]], Awaitable[int]]
"""Fills views and returns the checksum of the received bytes; calls its second argument before every write."""


class PartSender(Protocol):
    """The sending end of a path, for one transfer.

    Attributes:
        shares_memory: whether the receiver reads parts from buffers of this path.
        num_connections: number of connections that carry the parts. Each adds a window of unacknowledged bytes.
    """

    shares_memory: bool = False
    num_connections: int = 1

    def buffer(self, num_bytes: int) -> PartBuffer | None:
        """Memory from which the receiver reads a part of ``num_bytes``; ``None`` when none is free."""
        return None

    async def send(self, part: kv_pb2.KVPart, payload: Payload | Pieces | PartBuffer) -> None:
        """Returns once the path has taken the part. The caller sets a timeout.

        Args:
            part: complete except for the fields that only this path uses.
            payload: unchanged until the receiver has acknowledged the part.

        Raises:
            TransferError: ``payload`` is a buffer of another path.
            OSError: the path failed.
            BatonError: the stream failed.
        """
        ...

    def close(self, cause: OSError | None = None) -> None:
        """Ends the path; harmless when repeated.

        Args:
            cause: the error, if this path failed or stalled; later transfers may avoid the path.
        """
        return


class SendPath(Protocol):
    """The sending end of a path, for all transfers of a worker."""

    def offer(self, peer: PeerChannel, reserve: kv_pb2.KVReserve) -> None:
        """Adds what the receiver needs to know about this path to the reservation."""
        ...

    async def open(
        self, peer: PeerChannel, reserved: kv_pb2.KVReserved, num_bytes: int, write: Write
    ) -> PartSender | None:
        """Sets the path up for one transfer.

        Args:
            reserved: the receiver's answer.
            num_bytes: bytes of native KV that the transfer will move.

        Returns:
            ``None`` when the receiver did not accept this path or it cannot be set up; the next path is tried.
        """
        ...

    def close(self) -> None:
        """Releases what the worker's transfers share."""
        return


class PartIntake:
    """Writes the parts of one transfer into the sink and counts them. The receiving ends of paths deliver the parts.

    Every method that takes in a part raises ``BatonError`` when the part is not due, not as agreed, or damaged.

    Args:
        on_written: called after each part with the bytes of all parts written so far.
    """

    def __init__(self, sink: KVSink, transfer_id: str, on_written: Callable[[int], None]) -> None:
        self._sink = sink
        self._transfer_id = transfer_id
        self._on_written = on_written
        self._grown = asyncio.Event()
        self.num_parts = 0
        self.num_bytes = 0

    async def write(self, part: kv_pb2.KVPart, payload: memoryview) -> None:
        """Takes in a part from memory of this process."""
        await self._sink.write(self._transfer_id, _header_of(part), payload, part.checksum)
        self._count(len(payload))

    async def copy(self, part: kv_pb2.KVPart, payload: memoryview, check: Callable[[], None]) -> None:
        """Takes in a part from memory that the sender may change during the copy.

        Copying and checksumming happen in one pass, because a second pass would cost as much as the copy.

        Args:
            check: called after the copy; raises when the sender changed the memory.
        """
        header = _header_of(part)
        place = self._sink.place(self._transfer_id, header, len(payload))
        if place is None:
            await self._sink.write(self._transfer_id, header, payload, part.checksum)
        else:
            place.check()
            await place.filled(copy_summed((payload,), place.views), part.checksum)
        check()
        self._count(len(payload))

    async def fill(self, part: kv_pb2.KVPart, num_bytes: int, receive: Receive) -> None:
        """Takes in a part that ``receive`` writes directly to its destination, if the sink provides one."""
        header = _header_of(part)
        place = self._sink.place(self._transfer_id, header, num_bytes)
        if place is None:
            payload = memoryview(bytearray(num_bytes))
            await receive([payload], lambda: None)
            await self._sink.write(self._transfer_id, header, payload, part.checksum)
        else:
            await place.filled(await receive(place.views, place.check), part.checksum)
        self._count(num_bytes)

    async def reach(self, num_parts: int) -> None:
        """Returns when ``num_parts`` parts have been written."""
        while self.num_parts < num_parts:
            self._grown.clear()
            await self._grown.wait()

    def _count(self, num_bytes: int) -> None:
        self.num_parts += 1
        self.num_bytes += num_bytes
        self._grown.set()
        self._on_written(self.num_bytes)


class PartReceiver(Protocol):
    """The receiving end of a path, for one transfer.

    Attributes:
        reading: takes in parts that arrive outside the stream; ``None`` on other paths. Its error ends the transfer.
    """

    reading: asyncio.Future[None] | None = None

    async def receive(self, part: kv_pb2.KVPart, payload: memoryview) -> None:
        """Takes in a part that arrives in the stream.

        Args:
            payload: the bytes after the message's header; may be empty.

        Raises:
            BatonError: the part is not as agreed, not due, or damaged.
        """
        ...


class ReceivePath(Protocol):
    """The receiving end of a path, for all transfers of a worker."""

    def start(self, host: str) -> None:
        """Begins to listen, on paths that listen. If no port is available, this is logged and the path is not accepted.

        Args:
            host: address at which senders reach this worker.
        """
        return

    def accept(
        self, reserve: kv_pb2.KVReserve, reserved: kv_pb2.KVReserved, intake: PartIntake
    ) -> AbstractAsyncContextManager[PartReceiver | None]:
        """Opens the path for the duration of a transfer.

        Args:
            reserve: what the sender offers.
            reserved: the answer, sent once this context is entered; a path that accepts says so in it.
            intake: takes the parts.

        Returns:
            A context of ``None`` when this path cannot be used; the next path is tried.
        """
        ...

    async def close(self) -> None:
        """Releases what the worker's transfers share."""
        return


def _header_of(part: kv_pb2.KVPart) -> PartHeader:
    encoding = encoding_of(part.encoding)
    return PartHeader(part.token_start, part.token_count, part.layer_start, part.layer_end, encoding)
