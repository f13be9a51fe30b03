"""Non-negative least squares for a few coefficients. numpy only.

The active set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23), on normal equations.
"""

from __future__ import annotations

from math import inf

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_MAX_ROUNDS = 3
"""Per coefficient. In exact arithmetic the method terminates by itself, nearly always within one round each."""
_ROUNDING = 1e-12


def solve_non_negative(matrix: Floats, vector: Floats) -> Floats:
    """Minimises ``x·Mx/2 - v·x`` over ``x >= 0``; returns ``[n]``.

    Args:
        matrix: ``[n, n]``, symmetric and positive definite.
        vector: ``[n]``.
    """
    solution = np.asarray(np.linalg.solve(matrix, vector))
    if solution.min() >= 0.0:
        return solution
    count = len(vector)
    values, is_free = np.zeros(count), np.zeros(count, dtype=bool)
    smallest = _ROUNDING * float(np.abs(vector).max())
    for _ in range(_MAX_ROUNDS * count):
        gains = np.where(is_free, -inf, vector - matrix @ values)
        best = int(gains.argmax())
        if gains[best] <= smallest:
            break
        is_free[best] = True
        values = _within(matrix, vector, values, is_free)
    return values


def _within(matrix: Floats, vector: Floats, values: Floats, is_free: npt.NDArray[np.bool_]) -> Floats:
    """Solves for the free coefficients; one that would fall below zero is no longer free."""
    while True:
        wanted = np.zeros(len(values))
        wanted[is_free] = np.linalg.solve(matrix[np.ix_(is_free, is_free)], vector[is_free])
        falling = np.flatnonzero(is_free & (wanted <= 0.0))
        if not len(falling):
            return wanted
        steps = values[falling] / (values[falling] - wanted[falling] + np.finfo(float).tiny)
        values = np.maximum(values + steps.min() * (wanted - values), 0.0)
        is_free[falling[steps.argmin()]] = False
        values[~is_free] = 0.0
