"""The parts of one transfer, into a sink: from messages, from memory of the sender's, or from connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton.core.errors import TransferError
from baton.kv_transfer.base import KVSink, PartHeader
from baton.kv_transfer.codec import HEAD_LENGTH_BYTES, decode_head, encoding_of
from baton.kv_transfer.payload.raw_socket import ByteStream
from baton.kv_transfer.payload.summed_copy import copy_summed
from baton.rpc.channel import MAX_MESSAGE_BYTES
from baton.rpc.wire import kv_pb2

_MAX_HEAD_BYTES = 4096


class SenderMemory(Protocol):
    """A segment of the sender's, as this receiver reads it."""

    async def fetch(self, slot: kv_pb2.KVSlot) -> memoryview:
        """The payload in a slot, until the next call. What is done with it counts only if :meth:`check` finds nothing.

        Raises:
            TransferError: there is no such slot, it has been used again already, or it cannot be read.
        """
        ...

    def check(self, slot: kv_pb2.KVSlot) -> None:
        """Raises ``TransferError`` when the sender has used the slot again, unless the checksum of the part tells."""
        ...


class PartIntake:
    """Counts what it has written.

    Args:
        memory: of the sender's that parts may name, or None.
        written: told of the bytes written so far, whenever there are more.
    """

    def __init__(
        self, sink: KVSink, transfer_id: str, memory: SenderMemory | None, written: Callable[[int], None]
    ) -> None:
        self._sink = sink
        self._transfer_id = transfer_id
        self._memory = memory
        self._written = written
        self._grown = asyncio.Event()
        self.num_parts = 0
        self.num_bytes = 0

    async def from_message(self, part: kv_pb2.KVPart, payload: memoryview) -> None:
        """Takes one in, whose payload is here, or in the sender's memory.

        Raises:
            BatonError: it is not what was agreed on, not due, or damaged.
        """
        if not part.HasField("slot"):
            await self._sink.write(self._transfer_id, _header_of(part), payload, part.checksum)
            return self._count(len(payload))
        if self._memory is None or len(payload):
            raise TransferError("a KV part names memory that was not agreed on, or brings its payload all the same.")
        await self._copy(_header_of(part), await self._memory.fetch(part.slot), part.checksum)
        self._memory.check(part.slot)  # what was read while the sender wrote is not committed
        return self._count(part.slot.num_bytes)

    async def _copy(self, header: PartHeader, payload: memoryview, checksum: int) -> None:
        """To its place at once, if it has one: another reading of the payload costs as much as copying it."""
        place = self._sink.place(self._transfer_id, header, len(payload))
        if place is None:
            await self._sink.write(self._transfer_id, header, payload, checksum)
        else:
            place.check()
            await place.filled(copy_summed((payload,), place.views), checksum)

    async def from_connection(self, connection: ByteStream) -> None:
        """Takes one in, to which all bytes belong that come next.

        Raises:
            BatonError: as above.
            OSError: the connection ended.
        """
        part = await _next_part(connection)
        header, num_bytes = _header_of(part), part.num_bytes
        if not 0 < num_bytes <= MAX_MESSAGE_BYTES:
            raise TransferError(f"a KV part has {num_bytes} bytes, but must have 1 to {MAX_MESSAGE_BYTES}.")
        place = self._sink.place(self._transfer_id, header, num_bytes)
        if place is None:
            payload = memoryview(bytearray(num_bytes))
            await connection.receive([payload])
            await self._sink.write(self._transfer_id, header, payload, part.checksum)
        else:
            found = await connection.receive(place.views, place.check)
            await place.filled(found, part.checksum)
        self._count(num_bytes)

    async def reach(self, num_parts: int) -> None:
        """Returns when so many have been written."""
        while self.num_parts < num_parts:
            self._grown.clear()
            await self._grown.wait()

    def _count(self, num_bytes: int) -> None:
        self.num_parts += 1
        self.num_bytes += num_bytes
        self._grown.set()
        self._written(self.num_bytes)


async def _next_part(connection: ByteStream) -> kv_pb2.KVPart:
    length = bytearray(HEAD_LENGTH_BYTES)
    await connection.receive([memoryview(length)])
    num_bytes = int.from_bytes(length, "little")
    if num_bytes > _MAX_HEAD_BYTES:
        raise TransferError(f"a KV part's header has {num_bytes} bytes; the sender speaks another protocol.")
    head = bytearray(num_bytes)
    await connection.receive([memoryview(head)])
    return decode_head(bytes(head))


def _header_of(part: kv_pb2.KVPart) -> PartHeader:
    encoding = encoding_of(part.encoding)
    return PartHeader(part.token_start, part.token_count, part.layer_start, part.layer_end, encoding)
