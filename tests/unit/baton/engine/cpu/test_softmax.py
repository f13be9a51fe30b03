"""The softmax of rows against numpy's, and at its edges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from baton.engine.cpu.softmax import largest_of_rows, soften, weigh_rows

COUNT = 64
F32 = np.float32(0)
LOG2E = 1.4426950408889634
Row = npt.NDArray[np.float32]


@njit(error_model="numpy")
def _weigh(scores, num_rows, tops, scaling, sums):
    weigh_rows(F32, scores, num_rows, tops, scaling, sums)


@njit(error_model="numpy")
def _largest(scores, num_rows, out):
    largest_of_rows(scores, num_rows, out)


@njit(error_model="numpy")
def _soften(scores, num_rows, dim, scaling, state, highest, mass, spare):
    soften(F32, scores, num_rows, dim, scaling, state, highest, mass, spare)


def weigh(scores: npt.ArrayLike, top: float, scaling: float = 1.0) -> tuple[Row, float]:
    """A row, computed alone and as each of five, which must not differ."""
    alone, total = weigh_all(np.array([scores]), [top], scaling)
    rows, totals = weigh_all(np.array([scores] * 5), [top] * 5, scaling)
    np.testing.assert_array_equal(rows, np.repeat(alone, 5, axis=0))
    np.testing.assert_array_equal(totals, np.repeat(total, 5))
    return alone[0], total[0]


def weigh_all(scores: npt.ArrayLike, tops: list[float], scaling: float) -> tuple[Row, Row]:
    rows, highest = np.array(scores, dtype=np.float32), np.array(tops, dtype=np.float32)
    sums = np.empty_like(highest)
    _weigh(rows.ctypes.data, len(rows), highest.ctypes.data, np.float32(scaling), sums.ctypes.data)
    return rows, sums


def largest(scores: Row) -> Row:
    out = np.empty(len(scores), dtype=np.float32)
    _largest(scores.ctypes.data, len(scores), out.ctypes.data)
    return out


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 10.0, 100.0, 700.0]), st.sampled_from([1.0, 0.125, 0.0884])
)
def test_weights_match_the_exponential_function(seed: int, spread: float, scaling: float) -> None:
    scores = (np.random.default_rng(seed).standard_normal(COUNT) * spread).astype(np.float32)
    top = scores.max()
    weights, total = weigh(scores, top, scaling)
    distance = (scores - top).astype(np.float64) * np.float32(scaling)
    # A distance is a float32, rounded by up to half a unit once more when it becomes a power of two.
    tolerance = 3e-7 * (1 + np.abs(distance))
    seen = distance > -87
    exact = np.exp(distance)
    np.testing.assert_array_less(np.abs(weights - exact)[seen], (tolerance * exact)[seen])
    assert weights[~seen].max(initial=0.0) < 2e-38
    assert total == pytest.approx(weights.sum(dtype=np.float64), rel=1e-6)
    assert weights.max() == 1.0


def test_hidden_keys_weigh_nothing_and_nan_propagates() -> None:
    scores = np.zeros(COUNT)
    scores[3], scores[5], scores[7] = -np.inf, np.nan, -3.4e38
    weights, total = weigh(scores, 0.0)
    assert weights[3] == weights[7] == 0.0
    assert np.isnan(weights[5])
    assert np.isnan(total)
    assert (np.delete(weights, [3, 5, 7]) == 1.0).all()


def test_the_smallest_weights_are_normal_numbers_or_zero() -> None:
    """Never subnormal, and never what an exponent that wrapped around would give."""
    powers = np.linspace(-127.5, -125, COUNT)
    weights, _ = weigh(powers / LOG2E, 0.0)
    least = np.finfo(np.float32).tiny
    assert ((weights == 0.0) | (weights >= least)).all()
    assert (weights[powers < -126.001] == 0.0).all()
    assert (weights[powers > -125.999] > 0.0).all()


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_the_maximum_of_rows_is_found(num_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((num_rows, COUNT)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    np.testing.assert_array_equal(largest(scores), scores.max(axis=1))


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_chunked_softmax_matches_the_whole(num_rows: int, num_chunks: int, seed: int) -> None:
    """Rows that see nothing in some chunks, in the first ones too, and sums that are brought down to the largest."""
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal((num_rows, num_chunks, COUNT)) * 4).astype(np.float32)
    scores[rng.random((num_rows, num_chunks)) < 0.3] = -np.inf
    values = rng.standard_normal((num_chunks, COUNT, 16)).astype(np.float32)
    state, spare = np.zeros((num_rows, 16), dtype=np.float32), np.empty((2, num_rows), dtype=np.float32)
    highest, mass = np.full(num_rows, -np.inf, dtype=np.float32), np.zeros(num_rows, dtype=np.float32)
    for chunk in range(num_chunks):
        weights = scores[:, chunk].copy()
        places = (weights.ctypes.data, num_rows, 16, np.float32(0.5), state.ctypes.data)
        _soften(*places, highest, mass, spare.ctypes.data)
        state += weights @ values[chunk]
    np.testing.assert_array_equal(highest, scores.max(axis=(1, 2)))
    seen = highest > -np.inf
    assert (mass[~seen] == 0).all()
    assert (state[~seen] == 0).all()
    powers = np.exp(0.5 * (scores[seen].astype(np.float64) - highest[seen, None, None]))
    np.testing.assert_allclose(mass[seen], powers.sum(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(state[seen], np.einsum("rck,ckd->rd", powers, values), rtol=1e-4, atol=1e-4)


def test_nan_is_not_hidden() -> None:
    scores = np.zeros((5, COUNT), dtype=np.float32)
    scores[1, 3] = np.nan
    state, spare = np.zeros((5, 16), dtype=np.float32), np.empty((2, 5), dtype=np.float32)
    highest, mass = np.full(5, -np.inf, dtype=np.float32), np.zeros(5, dtype=np.float32)
    _soften(scores.ctypes.data, 5, 16, np.float32(1.0), state.ctypes.data, highest, mass, spare.ctypes.data)
    np.testing.assert_array_equal(np.isnan(mass), [False, True, False, False, False])
