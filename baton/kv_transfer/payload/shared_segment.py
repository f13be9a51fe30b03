"""The sender's end of shared memory: slots that parts are read into, and that receivers on this host read from.

The memory is a sealed memfd. It has no name in /dev/shm, nor does that folder's size limit it: it is gone as soon as
neither a file descriptor nor a mapping of it is left, however the processes ended. Sealed, it cannot shrink, so that no
receiver ever reads beyond its end. Receivers open it as /proc/PID/fd/FD, which the kernel allows to processes of the
same user that see each other.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence

from baton.kv_transfer.payload.segment_layout import MAX_SLOTS, SEGMENT_NAME, TOKEN_BYTES, SegmentLayout, round_up
from baton.kv_transfer.payload.summed_copy import copy_summed
from baton.rpc.wire import kv_pb2

SEGMENT_BYTES = 64 * 1024 * 1024
"""For the parts of all of a sender's transfers. A page takes memory from its first use on, and few are used: one
transfer has at most 8 MiB on its way, and some parts that are being read. Registered for RDMA, all of it is locked."""
_MIN_SLOTS = 4


class Slot:
    """Implements :class:`baton.kv_transfer.base.PartBuffer`: a slot, from its taking to its release."""

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
        """What the receiver finds it by."""
        return kv_pb2.KVSlot(index=self.index, generation=self.generation, num_bytes=len(self.view))

    def fill(self, views: Sequence[memoryview]) -> None:
        self.checksum = copy_summed(views, (self.view,))

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.give_back(self.index)


class SharedSegment:
    """Slots of one size. One thread takes and releases them; any may write into those taken.

    Args:
        part_bytes: what a slot shall hold.

    Attributes:
        nixl: how NIXL can read it, if it can.

    Raises:
        OSError: this system has no such memory to give.
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
        """What a receiver needs to map it; valid until :meth:`close`."""
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
        """All of it."""
        return self._memory

    def take(self, num_bytes: int) -> Slot | None:
        """A slot of which the first ``num_bytes`` are to be used; None when it would not fit, or none is free."""
        if not self._free or not 0 < num_bytes <= self.layout.slot_bytes:
            return None
        index = self._free.pop()  # the one released last, which the processor's caches still hold
        self._generations[index] += 1
        start = self.layout.slot_start(index)
        return Slot(self, index, self._generations[index], self._memory[start : start + num_bytes])

    def give_back(self, index: int) -> None:
        """Of :class:`Slot` alone."""
        self._free.append(index)

    def close(self) -> None:
        """Nobody can map it any more. The memory goes with the last mapping and the last view."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _sealed_memory(num_bytes: int) -> tuple[int, mmap.mmap]:
    """A memfd and its mapping. Raises OSError."""
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
