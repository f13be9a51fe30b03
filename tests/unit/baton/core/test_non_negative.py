"""The solution is the least that there is: no value can be changed for the better without falling below zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.non_negative import solve_non_negative

numbers = st.floats(-10.0, 10.0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A matrix that is positive definite, and a vector."""
    size = draw(st.integers(1, 7))
    rows = np.array(draw(st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=1, max_size=12)))
    vector = np.array(draw(st.lists(numbers, min_size=size, max_size=size)))
    return rows.T @ rows + np.eye(size), vector


@given(problems())
def test_the_karush_kuhn_tucker_conditions_hold(problem: tuple[np.ndarray, np.ndarray]) -> None:
    matrix, vector = problem
    before = matrix.copy(), vector.copy()
    values = solve_non_negative(matrix, vector)
    slope = matrix @ values - vector
    tolerance = 1e-9 * np.abs(matrix).max() * max(1.0, np.abs(vector).max())
    assert values.min() >= 0.0
    assert slope.min() >= -tolerance  # more of nothing helps
    assert np.abs(slope[values > 0]).max(initial=0.0) <= tolerance  # nor does more or less of what there is
    assert np.array_equal(matrix, before[0])
    assert np.array_equal(vector, before[1])


def test_an_initially_negative_coefficient_can_return() -> None:
    """Leaving out for good all that are negative without bounds would give (4/23, 0, 0)."""
    matrix = np.array([[23.0, 15.0, 7.0], [15.0, 14.0, 2.0], [7.0, 2.0, 6.0]])
    vector = np.array([4.0, -2.0, 4.0])
    assert (np.linalg.solve(matrix, vector) < 0).tolist() == [False, True, True]
    assert solve_non_negative(matrix, vector) == pytest.approx([0.0, 0.0, 2 / 3])


def test_all_coefficients_can_be_zero() -> None:
    assert solve_non_negative(np.eye(3), np.array([-1.0, -2.0, 0.0])).tolist() == [0.0, 0.0, 0.0]
