"""What is decided when code is made, whatever the CPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fused import emitter
from engine.fused.emitter import parts_in_registers


@given(count=st.integers(1, 16), sums_each=st.integers(1, 30), most=st.sampled_from((12, 24)))
def test_parts_are_even_and_their_sums_fit(count: int, sums_each: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emitter, "_most_sums", lambda: most)
        parts = parts_in_registers(count, sums_each)
    assert [number for part in parts for number in part] == list(range(count))
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) == 1 or len(parts[0]) * sums_each <= most


def test_a_tile_is_one_part_where_registers_are_many() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emitter, "_most_sums", lambda: 24)
        assert parts_in_registers(4, 4) == [range(4)]
        patch.setattr(emitter, "_most_sums", lambda: 12)
        assert parts_in_registers(4, 4) == [range(2), range(2, 4)]
        assert parts_in_registers(16, 1) == [range(8), range(8, 16)]
