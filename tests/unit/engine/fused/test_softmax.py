"""A row's softmax against numpy's, and at its edges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from engine.fused.softmax import largest, weigh_row

COUNT = 64
LOG2E = 1.4426950408889634
Row = npt.NDArray[np.float32]


@njit(error_model="numpy")
def _weigh(scores, top, scaling):
    return weigh_row(scores, 64, top, scaling)


@njit(error_model="numpy")
def _largest(scores):
    return largest(scores, 64)


def weigh(scores: npt.ArrayLike, top: float, scaling: float = 1.0) -> tuple[Row, float]:
    row = np.array(scores, dtype=np.float32)
    total = _weigh(row.ctypes.data, np.float32(top), np.float32(scaling))
    return row, total


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 10.0, 100.0, 700.0]), st.sampled_from([1.0, 0.125, 0.0884])
)
def test_weights_are_powers_of_e(seed: int, spread: float, scaling: float) -> None:
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


def test_what_cannot_be_seen_weighs_nothing_and_nan_stays() -> None:
    scores = np.zeros(COUNT)
    scores[3], scores[5], scores[7] = -np.inf, np.nan, -3.4e38
    weights, total = weigh(scores, 0.0)
    assert weights[3] == weights[7] == 0.0
    assert np.isnan(weights[5])
    assert np.isnan(total)
    assert (np.delete(weights, [3, 5, 7]) == 1.0).all()


def test_the_smallest_weights_are_numbers_or_zero() -> None:
    """Never subnormal, and never what an exponent that wrapped around would give."""
    powers = np.linspace(-127.5, -125, COUNT)
    weights, _ = weigh(powers / LOG2E, 0.0)
    least = np.finfo(np.float32).tiny
    assert ((weights == 0.0) | (weights >= least)).all()
    assert (weights[powers < -126.001] == 0.0).all()
    assert (weights[powers > -125.999] > 0.0).all()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=COUNT, max_size=COUNT))
def test_the_largest_of_a_row(scores: list[float]) -> None:
    row = np.array(scores, dtype=np.float32)
    assert _largest(row.ctypes.data) == row.max()


def test_numbers_win_over_nan() -> None:
    row = np.full(COUNT, np.nan, dtype=np.float32)
    row[17] = -5.0
    assert _largest(row.ctypes.data) == -5.0
