"""The receiver's end of shared memory: segments of senders on this host, mapped read-only while they are in use."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import stat

from baton.core.errors import TransferError
from baton.kv_transfer.payload.segment_layout import SEGMENT_NAME, TOKEN_BYTES, SegmentLayout
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

IDLE_S = 30.0
"""How long the memory of a sender that sends nothing, or is dead, stays mapped here."""


class MappedSegment:
    """A sender's segment. Its memory stays as long as this object, whatever becomes of the sender."""

    def __init__(self, memory: mmap.mmap, layout: SegmentLayout) -> None:
        self._memory = memoryview(memory)
        self._layout = layout
        self._generations = self._memory[layout.generations].cast("Q")
        self.num_users = 0
        self.expiry: asyncio.TimerHandle | None = None

    def read(self, slot: kv_pb2.KVSlot) -> memoryview:
        """The payload in a slot. What is done with it counts only if :meth:`check` finds the slot unchanged behind it.

        Raises:
            TransferError: there is no such slot, or it has been used again already.
        """
        self._layout.check(slot)
        self.check(slot)
        start = self._layout.slot_start(slot.index)
        return self._memory[start : start + slot.num_bytes]

    async def fetch(self, slot: kv_pb2.KVSlot) -> memoryview:
        """See :class:`baton.kv_transfer.payload.part_intake.SenderMemory`."""
        return self.read(slot)

    def check(self, slot: kv_pb2.KVSlot) -> None:
        """Raises :class:`TransferError` when the sender has used the slot again: it has given the transfer up."""
        found = self._generations[slot.index]
        if found != slot.generation or not found:
            raise TransferError(
                f"slot {slot.index} of the sender's memory has generation {found}, where a KV part is of generation "
                f"{slot.generation}: the sender did not wait for it to be read."
            )


class SegmentMappings:
    """Segments by their token. Those that no transfer uses are unmapped after ``idle_s`` seconds."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._segments: dict[bytes, tuple[kv_pb2.KVSegment, MappedSegment]] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def attach(self, offer: kv_pb2.KVSegment) -> MappedSegment | None:
        """Maps a sender's segment for one transfer, which ends with :meth:`detach`.

        Returns:
            None when this process does not see the sender's memory, as on another host or in another container.
        """
        known, segment = self._segments.get(offer.token, (None, None))
        if segment is None or known != offer:
            try:
                segment = _map(offer)
            except (OSError, ValueError) as error:
                logger.debug("a sender's memory cannot be mapped, its KV comes in messages: %s", error)
                return None
            self._segments[offer.token] = offer, segment
        segment.num_users += 1
        if segment.expiry is not None:
            segment.expiry.cancel()
            segment.expiry = None
        return segment

    def detach(self, segment: MappedSegment) -> None:
        """The transfer is over."""
        segment.num_users -= 1
        if segment.num_users == 0:
            segment.expiry = asyncio.get_running_loop().call_later(self._idle_s, self._forget, segment)

    def _forget(self, segment: MappedSegment) -> None:
        segment.expiry = None
        self._segments = {token: entry for token, entry in self._segments.items() if entry[1] is not segment}


def _map(offer: kv_pb2.KVSegment) -> MappedSegment:
    """Raises OSError or ValueError unless it is the sender's own segment, and safe to read."""
    layout = SegmentLayout(offer.num_slots, offer.slot_bytes)
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    # Looked at before it is opened: a stranger may name any file of any process, and opening some of them has effects.
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
        raise ValueError(f"{path} is another segment")
    return MappedSegment(memory, layout)
