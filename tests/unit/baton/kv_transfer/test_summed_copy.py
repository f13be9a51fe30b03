"""Copies from stretches into stretches, however either side is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer import codec
from baton.kv_transfer.codec import copy_summed


def cut(data: bytearray, places: set[int]) -> list[memoryview]:
    """Into stretches, some of them empty."""
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [memoryview(data)[start:end] for start, end in pairwise(ends)]


CUTS = st.sets(st.integers(0, 500), max_size=8)


@given(data=st.binary(max_size=400), sources=CUTS, targets=CUTS)
def test_the_copy_and_its_checksum_match_the_source(data: bytes, sources: set[int], targets: set[int]) -> None:
    target = bytearray(len(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "CHUNK_BYTES", 7)
        found = copy_summed(cut(bytearray(data), sources), cut(target, targets))
    assert target == data
    assert found == xxhash.xxh3_64_intdigest(data)


def test_the_checksum_covers_the_copy_even_if_the_source_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "CHUNK_BYTES", 4)
    memory = memoryview(bytearray(b"abcdefgh...."))
    found = copy_summed([memory[:8]], [memory[4:]])  # the first four bytes go where the next four are read
    assert memory[4:] == b"abcdabcd"
    assert found == xxhash.xxh3_64_intdigest(b"abcdabcd")


@pytest.mark.parametrize("room", [3, 5])
def test_other_lengths_are_refused(room: int) -> None:
    target = bytearray(room)
    with pytest.raises(ValueError, match=f"4 bytes into a buffer of {room} bytes"):
        copy_summed([memoryview(b"four")], [memoryview(target)])
    assert not any(target)
