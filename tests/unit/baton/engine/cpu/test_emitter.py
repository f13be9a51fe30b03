"""What is decided when code is made, whatever the CPU."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir
from llvmlite.binding import FeatureMap

from baton.engine.cpu import emitter
from baton.engine.cpu.emitter import features, parts_in_registers


@given(count=st.integers(1, 16), sums_each=st.integers(1, 30), most=st.sampled_from((12, 24)))
def test_parts_are_even_and_add_up(count: int, sums_each: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emitter, "_most_sums", lambda: most)
        parts = parts_in_registers(count, sums_each)
    assert [number for part in parts for number in part] == list(range(count))
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) == 1 or len(parts[0]) * sums_each <= most


def test_a_tile_is_one_part_with_enough_registers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emitter, "_most_sums", lambda: 24)
        assert parts_in_registers(4, 4) == [range(4)]
        patch.setattr(emitter, "_most_sums", lambda: 12)
        assert parts_in_registers(4, 4) == [range(2), range(2, 4)]
        assert parts_in_registers(16, 1) == [range(8), range(8, 16)]


@pytest.mark.parametrize(("named", "expected"), [("+avx2,-avx512f,+fma", {"avx2", "fma"}), ("", set())])
def test_code_uses_the_features_enabled_in_numba(
    named: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitter.config, "CPU_FEATURES", named)
    assert features.__wrapped__() == expected


def test_code_avoids_avx_if_numba_disables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host = {"avx": True, "avx2": True, "avx512f": True, "sse2": True, "amx-tile": False}
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: FeatureMap(host))
    monkeypatch.setattr(emitter.config, "CPU_FEATURES", None)
    for enabled, expected in ((1, {"avx", "avx2", "avx512f", "sse2"}), (0, {"sse2"})):
        monkeypatch.setattr("numba.core.config.ENABLE_AVX", enabled)
        assert features.__wrapped__() == expected


class Shuffles:
    """A builder of the two operations that folding takes, which computes them at once."""

    @staticmethod
    def shuffle_vector(first: Lanes, second: Lanes, mask: ir.Constant) -> Lanes:
        both = [*first.values, *second.values]
        return Lanes([both[lane.constant] for lane in mask.constant])

    @staticmethod
    def fadd(first: Lanes, second: Lanes) -> Lanes:
        return Lanes([a + b for a, b in zip(first.values, second.values, strict=True)])


class Lanes:
    """A vector."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.type = ir.VectorType(emitter.F32, len(values))


@given(count=st.integers(1, 40), width=st.sampled_from((4, 8, 16)))
def test_sums_over_lanes_keep_their_order(count: int, width: int) -> None:
    vectors = [Lanes([float(100 * number + lane) for lane in range(width)]) for number in range(count)]
    folded = emitter.Emitter(cast("ir.IRBuilder", Shuffles())).fold(cast("list[ir.Value]", vectors))
    assert len(folded) == -(-count // width)
    sums = [value for vector in folded for value in vector.values][:count]
    assert sums == [sum(vector.values) for vector in vectors]
