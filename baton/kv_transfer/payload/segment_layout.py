"""Where things are in a segment, the memory that one sender shares with the receivers of its host.

|token|..|g0 g1 g2 ...|.........|slot 0 ......|slot 1 ......|slot 2 ......|
0     16 64                     whole pages   + slot_bytes  + 2 * slot_bytes

token: random, so that nobody takes another segment for this one. g: the generation of each slot, 64 bits in the
machine's order; the sender counts it up before it writes into the slot, whoever read the slot by an earlier generation
has read something else.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from baton.core.errors import TransferError
from baton.rpc.wire import kv_pb2

SEGMENT_NAME = "baton-kv"
"""Of the memfd; what /proc/PID/fd shows."""
TOKEN_BYTES = 16
GENERATION_BYTES = 8
MAX_SLOTS = 4096
MAX_SEGMENT_BYTES = 1 << 30
_FIRST_GENERATION = 64


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """
    Raises:
        ValueError: numbers that no segment has.
    """

    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.num_slots <= MAX_SLOTS:
            raise ValueError(f"a segment has 1 to {MAX_SLOTS} slots, not {self.num_slots}")
        if self.slot_bytes <= 0 or self.slot_bytes % mmap.PAGESIZE:
            raise ValueError(f"a slot has whole pages of {mmap.PAGESIZE} bytes, not {self.slot_bytes} bytes")
        if self.num_bytes > MAX_SEGMENT_BYTES:
            raise ValueError(f"a segment has at most {MAX_SEGMENT_BYTES} bytes, not {self.num_bytes}")

    def check(self, slot: kv_pb2.KVSlot) -> None:
        """Raises :class:`TransferError` unless there is such a slot, with room for what shall be in it."""
        if not slot.index < self.num_slots or not 0 < slot.num_bytes <= self.slot_bytes:
            raise TransferError(
                f"a KV part names {slot.num_bytes} bytes of slot {slot.index}, but there are {self.num_slots} slots "
                f"of {self.slot_bytes} bytes."
            )

    @property
    def generations(self) -> slice:
        """Where the generations are."""
        return slice(_FIRST_GENERATION, self._generations_end)

    @property
    def num_bytes(self) -> int:
        """Of the whole segment."""
        return self.slot_start(self.num_slots)

    def slot_start(self, index: int) -> int:
        """Where a slot begins."""
        return round_up(self._generations_end, mmap.PAGESIZE) + index * self.slot_bytes

    @property
    def _generations_end(self) -> int:
        return _FIRST_GENERATION + self.num_slots * GENERATION_BYTES


def round_up(num_bytes: int, unit: int) -> int:
    """To a multiple of ``unit``."""
    return -(-num_bytes // unit) * unit
