"""Shared memory of a sender and its receivers: reads never see another receiver's data or pass the end."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from baton.core.errors import TransferError
from baton.kv_transfer.flow import BuffersInFlight
from baton.kv_transfer.payload.segment import (
    GENERATION_BYTES,
    MAX_SLOTS,
    SEGMENT_NAME,
    TOKEN_BYTES,
    MappedSegment,
    SegmentLayout,
    SharedSegment,
    Slot,
)
from baton.kv_transfer.payload.shared_memory import SegmentMappings, SharedMemorySendPath
from baton.rpc.wire.kv_pb2 import KVSegment, KVSlot
from tests.unit.baton.kv_transfer.links import num_mappings, num_mappings_before
from tests.waiting import TIMEOUT_S

PAGE = mmap.PAGESIZE


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    made = SharedSegment(2 * PAGE, 8 * PAGE)
    yield made
    made.close()


def mapped(segment: SharedSegment) -> MappedSegment:
    found = SegmentMappings().attach(segment.offer)
    assert found is not None
    return found


def taken(segment: SharedSegment, content: bytes) -> Slot:
    slot = segment.take(len(content))
    assert slot is not None
    slot.view[:] = content
    return slot


def copied(slot: KVSlot, **changes: int) -> KVSlot:
    values = {"index": slot.index, "generation": slot.generation, "num_bytes": slot.num_bytes}
    return KVSlot(**{**values, **changes})


def num_descriptors() -> int:
    """The number of this process's descriptors of segments."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # other threads open and close files
            count += SEGMENT_NAME in os.readlink(link)
    return count


@given(st.integers(1, MAX_SLOTS), st.integers(1, 60))
def test_regions_of_a_segment_do_not_overlap(num_slots: int, num_pages: int) -> None:
    layout = SegmentLayout(num_slots, num_pages * PAGE)
    assert layout.generations.start >= TOKEN_BYTES
    assert layout.generations.start % GENERATION_BYTES == 0
    assert layout.generations.stop - layout.generations.start == num_slots * GENERATION_BYTES
    assert layout.slot_start(0) >= layout.generations.stop
    starts = [layout.slot_start(index) for index in range(num_slots)]
    assert all(start % PAGE == 0 for start in starts)
    assert [*starts[1:], layout.num_bytes] == [start + layout.slot_bytes for start in starts]


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes"), [(0, PAGE), (MAX_SLOTS + 1, PAGE), (4, 0), (4, PAGE + 1), (4096, 1 << 20)]
)
def test_invalid_segment_layouts_are_refused(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"slots|pages|bytes"):
        SegmentLayout(num_slots, slot_bytes)


@settings(max_examples=40)
@given(st.integers(1, 5 * PAGE), st.integers(1, 40 * PAGE))
def test_parts_of_any_size_find_a_slot(part_bytes: int, segment_bytes: int) -> None:
    segment = SharedSegment(part_bytes, segment_bytes)
    try:
        content = os.urandom(part_bytes)
        slots = [taken(segment, content) for _ in range(segment.num_free_slots)]
        assert len(slots) >= 4
        assert segment.take(1) is None
        reader = mapped(segment)
        assert all(bytes(reader.read(slot.reference)) == content for slot in slots)
    finally:
        segment.close()


def test_a_part_larger_than_every_slot_gets_none(segment: SharedSegment) -> None:
    assert segment.take(0) is None
    assert segment.take(2 * PAGE + 1) is None
    assert segment.take(2 * PAGE) is not None


class SlotsAndReaders(RuleBasedStateMachine):
    """A sender that takes, writes and releases in any order, and a receiver that may still know what is old."""

    slots = Bundle("slots")
    known = Bundle("known")

    def __init__(self) -> None:
        super().__init__()
        self.segment = SharedSegment(PAGE, 4 * PAGE)
        self.reader = mapped(self.segment)
        self.held: dict[Slot, bytes] = {}
        self.current: dict[int, tuple[int, bytes]] = {}

    @precondition(lambda self: self.segment.num_free_slots)
    @rule(target=slots, content=st.binary(min_size=1, max_size=PAGE))
    def take(self, content: bytes) -> Slot:
        slot = taken(self.segment, content)
        assert all(slot.index != other.index for other in self.held), "one slot for two parts"
        self.held[slot] = content
        self.current[slot.index] = slot.generation, content
        return slot

    @precondition(lambda self: not self.segment.num_free_slots)
    @rule()
    def take_none(self) -> None:
        assert self.segment.take(1) is None

    @rule(target=known, slot=slots)
    def tell(self, slot: Slot) -> KVSlot:
        return slot.reference

    @rule(slot=consumes(slots))
    def release(self, slot: Slot) -> None:
        slot.release()
        slot.release()
        del self.held[slot]

    @rule(reference=known)
    def read(self, reference: KVSlot) -> None:
        """Either what was written for this reference, or an error."""
        generation, content = self.current[reference.index]
        if generation == reference.generation:
            assert bytes(self.reader.read(reference)) == content
        else:
            with pytest.raises(TransferError, match="generation"):
                self.reader.read(reference)

    @invariant()
    def slots_and_contents_are_kept(self) -> None:
        assert self.segment.num_free_slots + len(self.held) == 4
        assert all(bytes(slot.view) == content for slot, content in self.held.items())

    def teardown(self) -> None:
        self.segment.close()


SlotsAndReaders.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestSlotsAndReaders = SlotsAndReaders.TestCase


@given(st.lists(st.integers(1, PAGE), min_size=1, max_size=40), st.data())
def test_slots_are_freed_only_by_acknowledgements(sizes: list[int], data: st.DataObject) -> None:
    segment = SharedSegment(PAGE, 4 * PAGE)
    slots = BuffersInFlight()
    ends: list[int] = []
    sent = 0
    for size in sizes:
        slot = segment.take(size)
        if slot is None:  # as far back as the receiver may be
            assert len(ends) == 4
            acknowledged = data.draw(st.sampled_from(ends))
            slots.acknowledged(acknowledged)
            ends = [end for end in ends if end > acknowledged]
            slot = segment.take(size)
        assert slot is not None
        sent += size
        slots.sending(slot, sent)
        ends.append(sent)
        assert segment.num_free_slots == 4 - len(ends)
    slots.release_all()
    assert segment.num_free_slots == 4
    segment.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"index": 4},
        {"index": 2**32 - 1},
        {"num_bytes": 0},
        {"num_bytes": 2 * PAGE + 1},
        {"num_bytes": 2**64 - 1},
        {"generation": 0},
        {"generation": 2**64 - 1},
    ],
)
def test_unassigned_slots_are_refused(segment: SharedSegment, changes: dict[str, int]) -> None:
    slot = taken(segment, b"content")
    with pytest.raises(TransferError, match="slot"):
        mapped(segment).read(copied(slot.reference, **changes))


def test_changes_during_a_read_are_detected(segment: SharedSegment) -> None:
    slot, reader = taken(segment, b"content"), mapped(segment)
    view = reader.read(slot.reference)
    reader.check(slot.reference)
    slot.release()
    reader.check(slot.reference)  # the slot is untouched
    assert bytes(view) == b"content"
    again = taken(segment, b"another")
    assert again.index == slot.index
    with pytest.raises(TransferError, match="did not wait"):
        reader.check(slot.reference)


def test_receivers_cannot_write(segment: SharedSegment) -> None:
    view = mapped(segment).read(taken(segment, b"content").reference)
    assert view.readonly


@contextmanager
def memfd(name: str, num_bytes: int, *, token: bytes = b"", seals: int = fcntl.F_SEAL_SHRINK) -> Iterator[int]:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, token, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def offer_of(fd: int, token: bytes = b"t" * TOKEN_BYTES, num_slots: int = 4, slot_bytes: int = PAGE) -> KVSegment:
    return KVSegment(pid=os.getpid(), fd=fd, token=token, num_slots=num_slots, slot_bytes=slot_bytes)


TOKEN = b"t" * TOKEN_BYTES
LAYOUT = SegmentLayout(4, PAGE)


@pytest.mark.parametrize(
    ("name", "num_bytes", "token", "seals"),
    [
        ("another", LAYOUT.num_bytes, TOKEN, fcntl.F_SEAL_SHRINK),
        (SEGMENT_NAME, LAYOUT.num_bytes - 1, TOKEN, fcntl.F_SEAL_SHRINK),
        (SEGMENT_NAME, LAYOUT.num_bytes + PAGE, TOKEN, fcntl.F_SEAL_SHRINK),
        (SEGMENT_NAME, LAYOUT.num_bytes, b"u" * TOKEN_BYTES, fcntl.F_SEAL_SHRINK),
        (SEGMENT_NAME, LAYOUT.num_bytes, TOKEN, fcntl.F_SEAL_GROW),
    ],
    ids=["name", "too-short", "too-long", "token", "may-shrink"],
)
def test_unrelated_memory_is_not_mapped(name: str, num_bytes: int, token: bytes, seals: int) -> None:
    before = num_mappings_before()
    with memfd(name, num_bytes, token=token, seals=seals) as fd:
        mappings = SegmentMappings()
        assert mappings.attach(offer_of(fd)) is None
        assert len(mappings) == 0
    assert num_mappings() == before


def test_a_segment_with_everything_it_needs_is_mapped() -> None:
    with memfd(SEGMENT_NAME, LAYOUT.num_bytes, token=TOKEN) as fd:
        assert SegmentMappings().attach(offer_of(fd)) is not None


def test_files_devices_and_invalid_descriptors_are_not_opened() -> None:
    reading, writing = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY)
    with tempfile.TemporaryFile() as file:
        file.truncate(LAYOUT.num_bytes)
        for fd in (reading, null, file.fileno(), 2**31, 2**32 - 1):
            assert SegmentMappings().attach(offer_of(fd)) is None
    for fd in (reading, writing, null):
        os.close(fd)


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 0},
        {"pid": 2**32 - 1},
        {"token": b""},
        {"token": b"short"},
        {"num_slots": 0},
        {"num_slots": 2**32 - 1},
        {"slot_bytes": 0},
        {"slot_bytes": 7},
        {"slot_bytes": 2**64 - 1},
        {"slot_bytes": PAGE},
    ],
)
def test_offers_that_do_not_match_the_segment_are_declined(segment: SharedSegment, changes: dict[str, int]) -> None:
    offer = segment.offer
    for name, value in changes.items():
        setattr(offer, name, value)
    assert SegmentMappings().attach(offer) is None


def test_a_token_alone_gives_no_access_to_a_mapped_segment(segment: SharedSegment) -> None:
    mappings = SegmentMappings()
    assert mappings.attach(segment.offer) is not None
    other = segment.offer
    other.num_slots += 1
    assert mappings.attach(other) is None


def test_a_closed_segment_cannot_be_mapped(segment: SharedSegment) -> None:
    offer = segment.offer
    segment.close()
    assert SegmentMappings().attach(offer) is None


async def test_transfers_of_one_sender_share_a_mapping_until_the_last_one_ends(segment: SharedSegment) -> None:
    mappings, before = SegmentMappings(idle_s=0.02), num_mappings_before()
    first, second = mappings.attach(segment.offer), mappings.attach(segment.offer)
    assert first is second is not None
    assert num_mappings() == before + 1
    mappings.detach(first)
    await asyncio.sleep(0.05)
    assert len(mappings) == 1, "the other one uses it"
    mappings.detach(second)
    third = mappings.attach(segment.offer)
    assert third is first, "it is kept for a while"
    await asyncio.sleep(0.05)
    assert len(mappings) == 1
    mappings.detach(third)
    del first, second, third
    async with asyncio.timeout(TIMEOUT_S):
        while num_mappings() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert len(mappings) == 0


def test_without_shared_memory_there_is_one_warning_and_no_segment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(name: str, flags: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", none_left)
    memory = SharedMemorySendPath(PAGE)
    assert memory.segment() is memory.segment() is None
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "memory cannot be shared on this host, so KV is sent in messages: [Errno 28] No space left on device"
    ]
    monkeypatch.delattr(os, "memfd_create")
    assert SharedMemorySendPath(PAGE).segment() is None


def test_a_segment_is_created_once_and_frees_its_memory_when_closed() -> None:
    before, descriptors = num_mappings_before(), num_descriptors()
    memory = SharedMemorySendPath(PAGE)
    assert num_mappings() == before, "nothing has been sent yet"
    assert memory.segment() is memory.segment() is not None
    assert num_mappings() == before + 1
    assert num_descriptors() > descriptors
    memory.close()
    memory.close()
    assert memory.segment() is None
    assert num_mappings() == before
    assert num_descriptors() == descriptors
