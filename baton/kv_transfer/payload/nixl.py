"""Parts that receivers on any host read from the sender's memory through NIXL, with RDMA where UCX supports it.

The sender's memory is the segment of ``segment.py``, and parts name their slots as they do on one host. The sender
registers the segment with an agent, and its offer contains what receivers need to read it. A receiver on the same host
maps the segment instead, if it may.

A receiver first reads the token in the sender's memory. If that takes more than two seconds, or the bytes differ, parts
are sent as without NIXL, and the receiver tries to connect again a minute later. It does the same after a failed read.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.core.errors import TransferError
from baton.kv_transfer.payload.base import PartIntake, PartReceiver, ReceivePath
from baton.kv_transfer.payload.nixl_agent import FAILED, GRACE_S, SILENT, NixlAgent, Read, ReadingThread, address_of
from baton.kv_transfer.payload.segment import SEGMENT_BYTES, TOKEN_BYTES, SegmentLayout, SharedSegment
from baton.kv_transfer.payload.shared_memory import SharedMemorySendPath, SlotReceiver
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0
RETRY_S = 60.0
IDLE_S = 300.0
"""How long an idle or dead sender is remembered."""


class NixlSendPath(SharedMemorySendPath):
    """Registers the worker's segment, so that receivers on other hosts can read it.

    Raises:
        ConfigError: see :class:`baton.kv_transfer.payload.nixl_agent.NixlAgent`.
    """

    def __init__(self, part_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__(part_bytes, segment_bytes)
        self._agent = NixlAgent(serves=True)
        self._region: Any = None

    def make_segment(self) -> SharedSegment:
        segment = super().make_segment()
        try:
            self._region = self._agent.register(segment.memory)
            description = self._agent.description()
        except Exception as error:  # noqa: BLE001 - NIXL has many, of no common class
            logger.warning(
                "other hosts cannot read this worker's memory, so KV is sent to them over another path: "
                "NIXL cannot register %d bytes: %s",
                len(segment.memory),
                error,
            )
            return segment
        address = address_of(segment.memory)
        slots_address = address + segment.layout.slot_start(0)
        segment.nixl = kv_pb2.KVNixl(agent=description, address=address, slots_address=slots_address)
        return segment

    def close(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            try:
                self._agent.deregister(region)
            except Exception as error:  # noqa: BLE001 - as above; the process ends soon
                logger.warning("NIXL cannot deregister memory: %s", error)
        super().close()


@dataclass(eq=False, slots=True)
class _Buffer:
    """Registered memory that slots are read into.

    Attributes:
        region: NIXL's handle of the memory.
        is_read_into: whether NIXL may still write to the memory.
        is_taken: whether a transfer uses the buffer.
    """

    memory: memoryview
    address: int
    region: Any
    is_read_into: bool = False
    is_taken: bool = False


@dataclass(eq=False, slots=True)
class _Sender:
    """A sender whose memory can be read.

    Attributes:
        name: name of the sender's agent.
        is_lost: whether to forget the sender as soon as no transfer uses it.
    """

    name: str
    offer: kv_pb2.KVSegment
    is_lost: bool = False
    num_users: int = 0
    used_s: float = 0.0


class ReadableMemory:
    """One sender's segment, for one transfer.

    Implements :class:`baton.kv_transfer.payload.shared_memory.SenderMemory`.
    """

    def __init__(self, reader: NixlReader, sender: _Sender, layout: SegmentLayout, buffer: _Buffer) -> None:
        self._reader = reader
        self._sender = sender
        self._layout = layout
        self._buffer = buffer

    async def fetch(self, slot: kv_pb2.KVSlot) -> memoryview:
        self._layout.check(slot)
        start = self._sender.offer.nixl.slots_address + slot.index * self._layout.slot_bytes
        await self._reader.read(self._sender, start, slot.num_bytes, self._buffer)
        return self._buffer.memory[: slot.num_bytes]

    def check(self, slot: kv_pb2.KVSlot) -> None:
        """Does nothing: if the sender has reused the slot, the checksum differs."""


class NixlReader:
    """Reads segments that a :class:`NixlSendPath` has registered.

    Args:
        timeout_s: time limit of a read.
        connect_timeout_s: time limit of the first read from a sender.

    Raises:
        ConfigError: see :class:`baton.kv_transfer.payload.nixl_agent.NixlAgent`.
    """

    def __init__(self, timeout_s: float = READ_TIMEOUT_S, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._agent = NixlAgent(serves=False)
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._senders: dict[bytes, _Sender] = {}
        self._connecting: dict[bytes, asyncio.Task[_Sender | None]] = {}
        self._avoided: dict[bytes, float] = {}
        self._free: dict[int, list[_Buffer]] = {}
        self._buffers: list[_Buffer] = []  # keeps registered memory alive
        self._thread = ReadingThread(self._agent)

    @asynccontextmanager
    async def attached(self, offer: kv_pb2.KVSegment) -> AsyncIterator[ReadableMemory | None]:
        """A sender's segment for the duration of a transfer; ``None`` when it cannot be read."""
        sender = await self._find(offer)
        if sender is None:
            yield None
            return
        sender.num_users += 1
        buffer: _Buffer | None = None
        try:
            try:
                buffer = await self._take_buffer(offer.slot_bytes)
            except TransferError as error:
                logger.warning(
                    "no memory can be registered for reading KV, so it is received over another path: %s", error
                )
                yield None
                return
            layout = SegmentLayout(offer.num_slots, offer.slot_bytes)
            yield ReadableMemory(self, sender, layout, buffer)
        finally:
            if buffer is not None:
                self._give_back(buffer)
            sender.num_users -= 1
            sender.used_s = time.monotonic()
            self._forget_if_lost(sender)

    async def read(self, sender: _Sender, address: int, num_bytes: int, buffer: _Buffer) -> None:
        """Reads from the sender's memory into the beginning of ``buffer``.

        Raises:
            TransferError: NIXL could not read the memory in time.
        """
        try:
            await self._read(sender.name, address, num_bytes, buffer, self._timeout_s)
        except TransferError as error:
            self._avoid(sender.offer, error)
            self._lose(sender)
            raise

    async def close(self) -> None:
        """Ends every read; later ones fail."""
        buffers = [buffer for buffer in self._buffers if not buffer.is_read_into]
        for buffer in buffers:
            self._thread.post(partial(self._agent.deregister, buffer.region))
        self._thread.close()
        await asyncio.to_thread(self._thread.join)

    async def _find(self, offer: kv_pb2.KVSegment) -> _Sender | None:
        self._forget_idle()
        if self._avoided.get(offer.token, 0.0) > time.monotonic():
            return None
        known = self._senders.get(offer.token)
        if known is not None and known.offer == offer:
            return known
        connecting = self._connecting.get(offer.token)
        if connecting is None:
            connecting = self._connecting[offer.token] = asyncio.create_task(self._connect(offer))
            connecting.add_done_callback(lambda _: self._connecting.pop(offer.token))
        return await asyncio.shield(connecting)  # other transfers may wait for the same connection

    async def _connect(self, offer: kv_pb2.KVSegment) -> _Sender | None:
        try:
            sender = self._senders[offer.token] = await self._meet(offer)
        except (TransferError, ValueError) as error:
            self._avoid(offer, error)
            return None
        return sender

    async def _meet(self, offer: kv_pb2.KVSegment) -> _Sender:
        """Connects to a sender. Raises TransferError or ValueError unless its segment is at the offered address."""
        SegmentLayout(offer.num_slots, offer.slot_bytes)
        name = await self._thread.run(partial(self._agent.meet, offer.nixl.agent), self._connect_timeout_s)
        try:
            buffer = await self._take_buffer(mmap.PAGESIZE)
            try:
                await self._read(name, offer.nixl.address, TOKEN_BYTES, buffer, self._connect_timeout_s)
                if buffer.memory[:TOKEN_BYTES] != offer.token:
                    raise ValueError("the memory at the offered address has different content")
            finally:
                self._give_back(buffer)
        except BaseException:
            self._thread.post(partial(self._agent.forget, name))
            raise
        return _Sender(name, offer, used_s=time.monotonic())

    def _avoid(self, offer: kv_pb2.KVSegment, error: Exception) -> None:
        self._avoided[offer.token] = time.monotonic() + RETRY_S
        logger.warning(
            "the memory of the prefill worker with process id %d cannot be read; its KV uses another path for "
            "%.0f s: %s",
            offer.pid,
            RETRY_S,
            error,
        )

    def _lose(self, sender: _Sender) -> None:
        """Drops the connection to a sender, which does not recover. The next transfer connects anew."""
        sender.is_lost = True
        if self._senders.get(sender.offer.token) is sender:
            del self._senders[sender.offer.token]
        self._forget_if_lost(sender)

    def _forget_if_lost(self, sender: _Sender) -> None:
        if sender.is_lost and not sender.num_users:
            self._thread.post(partial(self._agent.forget, sender.name))

    def _forget_idle(self) -> None:
        now_s = time.monotonic()
        self._avoided = {token: until_s for token, until_s in self._avoided.items() if until_s > now_s}
        for sender in list(self._senders.values()):
            if not sender.num_users and now_s - sender.used_s > IDLE_S:
                self._lose(sender)

    async def _read(self, agent: str, address: int, num_bytes: int, buffer: _Buffer, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def finish(error: TransferError | None, has_ended: bool) -> None:
            buffer.is_read_into = not has_ended
            if not buffer.is_taken:
                self._give_back(buffer)  # the transfer that waited for the buffer has ended
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def report(error: TransferError | None, has_ended: bool) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, error, has_ended)

        buffer.is_read_into = True
        self._thread.read(Read(agent, (address, buffer.address, num_bytes), report, timeout_s))
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                await done
        except TimeoutError:
            raise TransferError(f"{FAILED}: {SILENT}.") from None

    async def _take_buffer(self, num_bytes: int) -> _Buffer:
        free = self._free.setdefault(num_bytes, [])
        buffer = free.pop() if free else await self._register(num_bytes)
        buffer.is_taken = True
        return buffer

    async def _register(self, num_bytes: int) -> _Buffer:
        making = asyncio.ensure_future(self._thread.run(partial(self._make_buffer, num_bytes), GRACE_S))
        try:
            buffer: _Buffer = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._keep)
            raise
        return buffer

    def _keep(self, making: asyncio.Future[_Buffer]) -> None:
        """Keeps a buffer for the next transfer when its own has ended."""
        if not making.cancelled() and making.exception() is None:
            self._give_back(making.result())

    def _make_buffer(self, num_bytes: int) -> _Buffer:
        memory = memoryview(mmap.mmap(-1, num_bytes))
        buffer = _Buffer(memory, address_of(memory), self._agent.register(memory))
        self._buffers.append(buffer)
        return buffer

    def _give_back(self, buffer: _Buffer) -> None:
        buffer.is_taken = False
        if not buffer.is_read_into:
            self._free[len(buffer.memory)].append(buffer)


class NixlReceivePath(ReceivePath):
    """Reads the memory of senders that have registered it.

    Raises:
        ConfigError: see :class:`baton.kv_transfer.payload.nixl_agent.NixlAgent`.
    """

    def __init__(self, reader: NixlReader | None = None) -> None:
        self._reader = NixlReader() if reader is None else reader

    @asynccontextmanager
    async def accept(
        self, reserve: kv_pb2.KVReserve, reserved: kv_pb2.KVReserved, intake: PartIntake
    ) -> AsyncIterator[PartReceiver | None]:
        if not reserve.segment.HasField("nixl"):
            yield None
            return
        async with self._reader.attached(reserve.segment) as memory:
            if memory is None:
                yield None
                return
            reserved.takes_segment = True
            yield SlotReceiver(intake, memory)

    async def close(self) -> None:
        await self._reader.close()
