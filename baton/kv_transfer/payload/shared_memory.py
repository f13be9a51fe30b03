"""Parts in memory that the sender shares with receivers on its host; a message names the slot of each part.

The sender offers its segment (``segment.py``) as /proc/PID/fd/FD, which processes of the same user and PID namespace
can open. A receiver that can map it says so in its answer. Parts that find no free slot are sent in their messages.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol
from weakref import WeakSet

from baton.kv_transfer.base import PartBuffer, Payload, Pieces
from baton.kv_transfer.codec import encode_part
from baton.kv_transfer.payload.base import PartIntake, PartReceiver, ReceivePath, SendPath, Write
from baton.kv_transfer.payload.inline import InlineReceiver, InlineSender
from baton.kv_transfer.payload.segment import (
    SEGMENT_BYTES,
    SEGMENT_NAME,
    TOKEN_BYTES,
    MappedSegment,
    SegmentLayout,
    SharedSegment,
    Slot,
)
from baton.kv_transfer.peer_channels import PeerChannel
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

IDLE_S = 30.0
"""How long the memory of an idle or dead sender stays mapped."""


class SlotSender(InlineSender):
    """Sends parts in slots by reference, and other parts in their messages."""

    shares_memory = True

    def __init__(self, segment: SharedSegment, write: Write) -> None:
        super().__init__(write)
        self._segment = segment

    def buffer(self, num_bytes: int) -> Slot | None:
        return self._segment.take(num_bytes)

    async def send(self, part: kv_pb2.KVPart, payload: Payload | Pieces | PartBuffer) -> None:
        if isinstance(payload, Slot):
            part.slot.CopyFrom(payload.reference)
            await self._write(encode_part(part))
        else:
            await super().send(part, payload)


class SharedMemorySendPath(SendPath):
    """Owns the worker's segment, which the first transfer creates.

    Args:
        part_bytes: size of the largest part that a slot holds.
        segment_bytes: size of all slots together.
    """

    def __init__(self, part_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._part_bytes = part_bytes
        self._segment_bytes = segment_bytes
        self._segment: SharedSegment | None = None
        self._has_ended = False
        self._remote_peers: WeakSet[PeerChannel] = WeakSet()

    def segment(self) -> SharedSegment | None:
        """The segment; ``None`` when the system does not support it, which is logged once."""
        if self._segment is None and not self._has_ended:
            try:
                self._segment = self.make_segment()
            except OSError as error:
                self._has_ended = True
                logger.warning("memory cannot be shared on this host, so KV is sent in messages: %s", error)
        return self._segment

    def make_segment(self) -> SharedSegment:
        """Creates the segment. Raises OSError when this system does not support such memory."""
        return SharedSegment(self._part_bytes, self._segment_bytes)

    def offer(self, peer: PeerChannel, reserve: kv_pb2.KVReserve) -> None:
        segment = self.segment()
        if segment is not None:
            reserve.segment.CopyFrom(segment.offer)

    async def open(
        self, peer: PeerChannel, reserved: kv_pb2.KVReserved, num_bytes: int, write: Write
    ) -> SlotSender | None:
        if self._segment is None:
            return None
        if reserved.takes_segment:
            return SlotSender(self._segment, write)
        if peer not in self._remote_peers:
            self._remote_peers.add(peer)
            logger.info("the worker at %s does not read this worker's memory", peer.peer)
        return None

    def close(self) -> None:
        self._has_ended = True
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()


class SenderMemory(Protocol):
    """A sender's segment from the receiver's side."""

    async def fetch(self, slot: kv_pb2.KVSlot) -> memoryview:
        """The payload in a slot, until the next call. It was valid only if :meth:`check` passes after its use.

        Raises:
            TransferError: the slot does not exist, the sender has already reused it, or it cannot be read.
        """
        ...

    def check(self, slot: kv_pb2.KVSlot) -> None:
        """Raises ``TransferError`` when the sender has reused the slot, unless the part's checksum reveals that."""
        ...


class SlotReceiver(InlineReceiver):
    """Takes in parts from slots of the sender's memory, and from messages."""

    def __init__(self, intake: PartIntake, memory: SenderMemory) -> None:
        super().__init__(intake)
        self._memory = memory

    async def receive(self, part: kv_pb2.KVPart, payload: memoryview) -> None:
        if not part.HasField("slot") or len(payload):
            await super().receive(part, payload)
        else:
            found = await self._memory.fetch(part.slot)
            await self._intake.copy(part, found, partial(self._memory.check, part.slot))


class SegmentMappings:
    """Mapped segments by token. Unused segments are unmapped after ``idle_s`` seconds."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._segments: dict[bytes, tuple[kv_pb2.KVSegment, MappedSegment]] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def attach(self, offer: kv_pb2.KVSegment) -> MappedSegment | None:
        """Maps a sender's segment for one transfer, which ends with :meth:`detach`.

        Returns:
            ``None`` when this process cannot see the sender's memory, as on another host or in another container.
        """
        known, segment = self._segments.get(offer.token, (None, None))
        if segment is None or known != offer:
            try:
                segment = _map(offer)
            except (OSError, ValueError) as error:
                logger.debug("a sender's memory cannot be mapped, so its KV is received in messages: %s", error)
                return None
            self._segments[offer.token] = offer, segment
        segment.num_users += 1
        if segment.expiry is not None:
            segment.expiry.cancel()
            segment.expiry = None
        return segment

    def detach(self, segment: MappedSegment) -> None:
        """Ends one transfer's use."""
        segment.num_users -= 1
        if segment.num_users == 0:
            segment.expiry = asyncio.get_running_loop().call_later(self._idle_s, self._forget, segment)

    def _forget(self, segment: MappedSegment) -> None:
        segment.expiry = None
        self._segments = {token: entry for token, entry in self._segments.items() if entry[1] is not segment}


class SharedMemoryReceivePath(ReceivePath):
    """Maps the segments of senders on this host."""

    def __init__(self, mappings: SegmentMappings | None = None) -> None:
        self._mappings = SegmentMappings() if mappings is None else mappings

    @asynccontextmanager
    async def accept(
        self, reserve: kv_pb2.KVReserve, reserved: kv_pb2.KVReserved, intake: PartIntake
    ) -> AsyncIterator[PartReceiver | None]:
        mapped = self._mappings.attach(reserve.segment) if reserve.HasField("segment") else None
        if mapped is None:
            yield None
            return
        reserved.takes_segment = True
        try:
            yield SlotReceiver(intake, mapped)
        finally:
            self._mappings.detach(mapped)


def _map(offer: kv_pb2.KVSegment) -> MappedSegment:
    """Maps an offered segment. Raises OSError or ValueError unless it is the sender's own and safe to read."""
    layout = SegmentLayout(offer.num_slots, offer.slot_bytes)
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    # Checked before opening: a malicious offer may name any file of any process, and opening some has side effects.
    if not os.readlink(path).startswith(f"/memfd:{SEGMENT_NAME}"):
        raise ValueError(f"{path} is not a segment")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != layout.num_bytes:
            raise ValueError(f"{path} is not a segment of this user with {layout.num_bytes} bytes")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError(f"{path} could shrink while it is read")
        memory = mmap.mmap(fd, layout.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if len(offer.token) != TOKEN_BYTES or memory[:TOKEN_BYTES] != offer.token:
        raise ValueError(f"{path} is a different segment")
    return MappedSegment(memory, layout)
