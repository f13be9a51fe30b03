"""The memory that a sender shares with receivers: a segment of slots, each of which holds one part.

    |token|..|g0 g1 g2 ...|.........|slot 0 ......|slot 1 ......|slot 2 ......|
    0     16 64                     whole pages   + slot_bytes  + 2 * slot_bytes

token: random bytes, by which a receiver verifies that it has found the right segment. g: the generation of each slot,
64 bits in native byte order. The sender increments it before it writes into the slot, so a receiver that read the slot
for an earlier generation detects that the content has changed.

The memory is a sealed memfd. It has no name in /dev/shm and is not limited by that folder's size. It is freed when the
last file descriptor and mapping are gone, even if the processes crashed. Because of the seal it cannot shrink, so no
receiver reads beyond its end.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import TransferError
from baton.kv_transfer.codec import copy_summed
from baton.rpc.wire import kv_pb2

SEGMENT_NAME = "baton-kv"
"""Name of the memfd, as /proc/PID/fd shows it."""
TOKEN_BYTES = 16
GENERATION_BYTES = 8
MAX_SLOTS = 4096
MAX_SEGMENT_BYTES = 1 << 30
SEGMENT_BYTES = 64 * 1024 * 1024
"""Size for the parts of all of a sender's transfers. A page takes memory from its first use on, and few are used: a
transfer has at most 8 MiB in flight, plus a few parts being read. If registered for RDMA, all of it is locked."""
_MIN_SLOTS = 4
_FIRST_GENERATION = 64


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The offsets within a segment.

    Raises:
        ValueError: the number or size of the slots is out of range.
    """

    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.num_slots <= MAX_SLOTS:
            raise ValueError(f"a segment must have 1 to {MAX_SLOTS} slots, got {self.num_slots}")
        if self.slot_bytes <= 0 or self.slot_bytes % mmap.PAGESIZE:
            raise ValueError(f"a slot must have whole pages of {mmap.PAGESIZE} bytes, got {self.slot_bytes} bytes")
        if self.num_bytes > MAX_SEGMENT_BYTES:
            raise ValueError(f"a segment must have at most {MAX_SEGMENT_BYTES} bytes, got {self.num_bytes}")

    def check(self, slot: kv_pb2.KVSlot) -> None:
        """Raises :class:`TransferError` unless the slot exists and its payload fits into it."""
        if not slot.index < self.num_slots or not 0 < slot.num_bytes <= self.slot_bytes:
            raise TransferError(
                f"a KV part names {slot.num_bytes} bytes of slot {slot.index}, but there are {self.num_slots} slots "
                f"of {self.slot_bytes} bytes."
            )

    @property
    def generations(self) -> slice:
        """The bytes of all generations."""
        return slice(_FIRST_GENERATION, self._generations_end)

    @property
    def num_bytes(self) -> int:
        """Size of the whole segment."""
        return self.slot_start(self.num_slots)

    def slot_start(self, index: int) -> int:
        """The offset of a slot."""
        return round_up(self._generations_end, mmap.PAGESIZE) + index * self.slot_bytes

    @property
    def _generations_end(self) -> int:
        return _FIRST_GENERATION + self.num_slots * GENERATION_BYTES


class Slot:
    """Implements :class:`baton.kv_transfer.base.PartBuffer`: one use of a slot, until it is released."""

    __slots__ = ("_owner", "checksum", "generation", "index", "view")

    def __init__(self, owner: SharedSegment, index: int, generation: int, view: memoryview) -> None:
        self._owner: SharedSegment | None = owner
        self.index = index
        self.generation = generation
        self.view = view
        self.checksum: int | None = None

    def __len__(self) -> int:
        return len(self.view)

    @property
    def reference(self) -> kv_pb2.KVSlot:
        """The slot as a part's message names it."""
        return kv_pb2.KVSlot(index=self.index, generation=self.generation, num_bytes=len(self.view))

    def fill(self, views: Sequence[memoryview]) -> None:
        self.checksum = copy_summed(views, (self.view,))

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.give_back(self.index)


class SharedSegment:
    """The sender's end: slots of one size. One thread takes and releases slots; any thread may write into taken slots.

    Args:
        part_bytes: size of the largest part that a slot holds.
        segment_bytes: size of all slots together; there are at least four slots.

    Attributes:
        nixl: what NIXL needs to read the segment; ``None`` when NIXL cannot read it.

    Raises:
        OSError: this system does not support such memory.
    """

    def __init__(self, part_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        slot_bytes = round_up(part_bytes, mmap.PAGESIZE)
        self.layout = SegmentLayout(min(max(segment_bytes // slot_bytes, _MIN_SLOTS), MAX_SLOTS), slot_bytes)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._fd, memory = _sealed_memory(self.layout.num_bytes)
        self._memory = memoryview(memory)
        self._memory[:TOKEN_BYTES] = self._token
        self._generations = self._memory[self.layout.generations].cast("Q")
        self._free = list(range(self.layout.num_slots))
        self.nixl: kv_pb2.KVNixl | None = None

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    @property
    def offer(self) -> kv_pb2.KVSegment:
        """What a receiver needs to find the segment; valid until :meth:`close`."""
        return kv_pb2.KVSegment(
            pid=os.getpid(),
            fd=self._fd,
            token=self._token,
            num_slots=self.layout.num_slots,
            slot_bytes=self.layout.slot_bytes,
            nixl=self.nixl,
        )

    @property
    def memory(self) -> memoryview:
        """The whole segment."""
        return self._memory

    def take(self, num_bytes: int) -> Slot | None:
        """Takes a slot for ``num_bytes``; ``None`` when they do not fit into a slot, or no slot is free."""
        if not self._free or not 0 < num_bytes <= self.layout.slot_bytes:
            return None
        index = self._free.pop()  # the last released slot, which may still be in the CPU's caches
        self._generations[index] += 1
        start = self.layout.slot_start(index)
        return Slot(self, index, self._generations[index], self._memory[start : start + num_bytes])

    def give_back(self, index: int) -> None:
        """Frees a slot. Called by :class:`Slot` only."""
        self._free.append(index)

    def close(self) -> None:
        """Prevents further receivers from mapping the segment. The last mapping and view free the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MappedSegment:
    """The receiver's end: a sender's segment, mapped read-only. Its memory outlives the sender.

    Implements :class:`baton.kv_transfer.payload.shared_memory.SenderMemory`.

    Attributes:
        num_users: number of transfers that use the segment.
        expiry: timer that unmaps the segment when it has no users.
    """

    def __init__(self, memory: mmap.mmap, layout: SegmentLayout) -> None:
        self._memory = memoryview(memory)
        self._layout = layout
        self._generations = self._memory[layout.generations].cast("Q")
        self.num_users = 0
        self.expiry: asyncio.TimerHandle | None = None

    def read(self, slot: kv_pb2.KVSlot) -> memoryview:
        """The payload in a slot. Call :meth:`check` after using it: the sender may have changed it in between.

        Raises:
            TransferError: the slot does not exist, or the sender has already reused it.
        """
        self._layout.check(slot)
        self.check(slot)
        start = self._layout.slot_start(slot.index)
        return self._memory[start : start + slot.num_bytes]

    async def fetch(self, slot: kv_pb2.KVSlot) -> memoryview:
        return self.read(slot)

    def check(self, slot: kv_pb2.KVSlot) -> None:
        """Raises :class:`TransferError` when the sender has reused the slot, because it aborted the transfer."""
        found = self._generations[slot.index]
        if found != slot.generation or not found:
            raise TransferError(
                f"slot {slot.index} of the sender's memory has generation {found}, where a KV part is of generation "
                f"{slot.generation}: the sender did not wait for it to be read."
            )


def round_up(num_bytes: int, unit: int) -> int:
    """``num_bytes``, rounded up to a multiple of ``unit``."""
    return -(-num_bytes // unit) * unit


def _sealed_memory(num_bytes: int) -> tuple[int, mmap.mmap]:
    """Creates a memfd and maps it. Raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    fd = os.memfd_create(SEGMENT_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException:
        os.close(fd)
        raise
