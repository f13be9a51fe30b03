"""Weighted sums of values against numpy's, and that a row's bits are its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit, types

from baton.engine.cpu.emitter import lanes
from baton.engine.cpu.key_slots import KEY_CHUNK
from baton.engine.cpu.mixing import has_rounded_weights, mix
from baton.engine.cpu.softmax import weigh_rows

HALF, SINGLE = np.uint16(0), np.float32(0)
LANES = lanes()
Floats = npt.NDArray[np.float32]
DIMS = st.sampled_from([16, 20, 32, 64, 80, 128, 136])


@njit(error_model="numpy")
def _mix(kind, weights, num_rows, values, ldv, slots, num_keys, ahead, dim, out):
    mix(kind, weights, num_rows, values, ldv, slots, num_keys, ahead, dim, LANES, out)


@njit(error_model="numpy")
def _weigh(kind, scores, num_rows, tops, scaling, sums):
    weigh_rows(kind, scores, num_rows, tops, scaling, sums)


def rounds(kind: Any) -> bool:
    return has_rounded_weights(types.uint16 if kind is HALF else types.float32)


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(values: npt.NDArray[np.uint16]) -> Floats:
    return (values.astype(np.uint32) << 16).view(np.float32)


def weights_in_memory(kind: Any, weights: Floats) -> Floats:
    """As rows of ``KEY_CHUNK`` float32, or as many bytes of which half are used."""
    if not rounds(kind):
        return weights.copy()
    rows = np.full((len(weights), 2 * KEY_CHUNK), 0x7FC0, dtype=np.uint16)  # NaN where nothing may read
    rows[:, :KEY_CHUNK] = to_bfloat16(weights)
    return rows.view(np.float32)


class Case:
    """Some rows' weights of the first keys of a chunk, and those keys' values in a cache of two heads."""

    def __init__(self, kind: Any, num_rows: int, num_keys: int, dim: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.num_keys, self.dim = kind, num_keys, dim
        self.weights = np.zeros((num_rows, KEY_CHUNK), dtype=np.float32)
        self.weights[:, :num_keys] = rng.random((num_rows, num_keys))
        cache = rng.standard_normal((KEY_CHUNK + 9, 2, dim)).astype(np.float32)
        self.cache = to_bfloat16(cache) if kind is HALF else cache
        self.slots = rng.permutation(len(cache))[:KEY_CHUNK].astype(np.int64)
        self.start = rng.standard_normal((num_rows, dim)).astype(np.float32)

    def mixed(self, rows: slice = slice(None), num_keys: int | None = None, *, ahead: int = 0) -> Floats:
        """What is computed for some of the rows, while what is ``ahead`` is asked for."""
        out, memory = self.start[rows].copy(), weights_in_memory(self.kind, self.weights[rows])
        place, ldv = self.cache[:, 1].ctypes.data, self.cache.strides[0]
        count = self.num_keys if num_keys is None else num_keys
        slots = self.slots.ctypes.data
        _mix(self.kind, memory.ctypes.data, len(out), place, ldv, slots, count, ahead, self.dim, out.ctypes.data)
        return out

    def expected(self) -> npt.NDArray[np.float64]:
        weights, values = self.weights, self.cache[self.slots, 1]
        if rounds(self.kind):
            weights = from_bfloat16(to_bfloat16(weights))
        numbers = from_bfloat16(values) if self.kind is HALF else values
        return self.start + weights.astype(np.float64) @ numbers.astype(np.float64)


@pytest.mark.parametrize("kind", [HALF, SINGLE], ids=["bfloat16", "float32"])
@given(st.integers(1, 9), st.integers(1, KEY_CHUNK), DIMS, st.integers(0, 2**32 - 1))
def test_sums_match_numpy(kind: Any, num_rows: int, num_keys: int, dim: int, seed: int) -> None:
    case = Case(kind, num_rows, num_keys, dim, seed)
    np.testing.assert_allclose(case.mixed(), case.expected(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [HALF, SINGLE], ids=["bfloat16", "float32"])
@given(st.integers(2, 9), st.integers(1, KEY_CHUNK), DIMS, st.integers(0, 2**32 - 1))
def test_bits_do_not_depend_on_other_rows_or_unseen_keys(
    kind: Any, num_rows: int, num_keys: int, dim: int, seed: int
) -> None:
    case = Case(kind, num_rows, num_keys, dim, seed)
    together = case.mixed()
    for row in range(num_rows):
        np.testing.assert_array_equal(case.mixed(slice(row, row + 1)), together[row : row + 1])
    # Other rows of an item may see more keys, of which these weigh nothing here.
    np.testing.assert_array_equal(case.mixed(num_keys=KEY_CHUNK), together)


@pytest.mark.parametrize("kind", [HALF, SINGLE], ids=["bfloat16", "float32"])
@given(st.integers(1, 9), st.integers(1, KEY_CHUNK), DIMS, st.sampled_from([1, 1 << 46, 2**63 - 1]))
def test_prefetching_beyond_the_end_changes_no_bit(
    kind: Any, num_rows: int, num_keys: int, dim: int, ahead: int
) -> None:
    case = Case(kind, num_rows, num_keys, dim, seed=dim)
    np.testing.assert_array_equal(case.mixed(ahead=ahead), case.mixed())


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_weights_are_rounded_only_for_pair_products(num_rows: int, seed: int) -> None:
    scores = np.random.default_rng(seed).standard_normal((num_rows, KEY_CHUNK)).astype(np.float32) * 3
    tops, rows, sums = scores.max(axis=1), {}, {}
    for kind in (HALF, SINGLE):
        rows[kind.dtype], sums[kind.dtype] = scores.copy(), np.empty(num_rows, dtype=np.float32)
        place, sums_at = rows[kind.dtype].ctypes.data, sums[kind.dtype].ctypes.data
        _weigh(kind, place, num_rows, tops.ctypes.data, np.float32(0.125), sums_at)
    exact, weights = rows[SINGLE.dtype], rows[HALF.dtype]
    if rounds(HALF):
        rounded = weights.view(np.uint16)[:, :KEY_CHUNK]
        np.testing.assert_array_equal(rounded, to_bfloat16(exact))
    else:
        np.testing.assert_array_equal(weights, exact)
    np.testing.assert_array_equal(sums[HALF.dtype], sums[SINGLE.dtype])
