"""Writes the parts of one transfer into a sink, and counts them. The payload paths bring the parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from baton.kv_transfer.base import KVSink, PartHeader
from baton.kv_transfer.checksums import copy_summed
from baton.kv_transfer.codec import encoding_of
from baton.rpc.wire import kv_pb2

Receive = Callable[[Sequence[memoryview], Callable[[], None]], Awaitable[int]]
"""Fills stretches of memory and returns the checksum of what came; calls its second argument before every write."""


class PartIntake:
    """
    Every method that takes in a part raises ``BatonError`` when the part is not due, not as agreed, or damaged.

    Args:
        on_written: called with the bytes of all parts written so far, whenever that grows.
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
        """Takes in a part from memory that the sender may change meanwhile.

        It is copied and summed at once, because another reading of the payload would cost as much as the copy.

        Args:
            check: called when all is copied; raises when the sender changed the memory.
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
        """Takes in a part that ``receive`` can write to its place, where the sink has one."""
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
        """Returns when so many parts have been written."""
        while self.num_parts < num_parts:
            self._grown.clear()
            await self._grown.wait()

    def _count(self, num_bytes: int) -> None:
        self.num_parts += 1
        self.num_bytes += num_bytes
        self._grown.set()
        self._on_written(self.num_bytes)


def _header_of(part: kv_pb2.KVPart) -> PartHeader:
    encoding = encoding_of(part.encoding)
    return PartHeader(part.token_start, part.token_count, part.layer_start, part.layer_end, encoding)
