"""The state of attention for some rows: sums of weighted values, highest scores, and masses (sums of weights).

Layout of a state, float32, where ``rows`` is rounded up to whole tiles, which a matrix unit can store::

    [rows, dim] sums | [rows] highest scores | [rows] masses
"""

from __future__ import annotations

import numpy as np
from numba import njit

from baton.engine.cpu.arithmetic import exp, floats, item_size, operands, to_operand
from baton.engine.cpu.tiles import TILE

STATE_ROWS = 128
"""Rows, in whole tiles, that a thread's memory for the states of an item's heads can hold."""
_MINUS_INFINITY = np.float32(-np.inf)
_ONE = np.float32(1)


@njit(inline="always", error_model="numpy")
def whole_rows(num_rows):
    """Number of rows in a state's memory."""
    return (num_rows + TILE - 1) // TILE * TILE


@njit(inline="always", error_model="numpy")
def state_floats(num_rows, dim):
    """Size of the state of some rows, in float32 values."""
    return whole_rows(num_rows) * (dim + 2)


@njit(inline="always", error_model="numpy")
def highest_at(state, num_rows, dim):
    """Address of the rows' highest scores."""
    return state + 4 * whole_rows(num_rows) * dim


@njit(inline="always", error_model="numpy")
def mass_at(state, num_rows, dim):
    """Address of the rows' masses."""
    return state + 4 * whole_rows(num_rows) * (dim + 1)


@njit(error_model="numpy")
def merge_states(num_rows, dim, scaling, first, second):
    """Adds the second state of the rows to the first."""
    highest, mass = floats(highest_at(first, num_rows, dim), num_rows), floats(mass_at(first, num_rows, dim), num_rows)
    other, more = floats(highest_at(second, num_rows, dim), num_rows), floats(mass_at(second, num_rows, dim), num_rows)
    for i in range(num_rows):
        if other[i] == _MINUS_INFINITY:
            continue
        top = max(highest[i], other[i])
        mine, theirs = exp((highest[i] - top) * scaling), exp((other[i] - top) * scaling)
        total, addend = floats(first + 4 * i * dim, dim), floats(second + 4 * i * dim, dim)
        for d in range(dim):
            total[d] = total[d] * mine + addend[d] * theirs
        mass[i] = mass[i] * mine + more[i] * theirs
        highest[i] = top


@njit(error_model="numpy")
def store_results(kind, num_rows, dim, state, num_heads, head, share, first_token, out):
    """Divides the sums by the rows' masses and stores them where the output projection reads them."""
    size = item_size(kind)
    mass = floats(mass_at(state, num_rows, dim), num_rows)
    for i in range(num_rows):
        row, factor = floats(state + 4 * dim * i, dim), _ONE / mass[i]
        target = out + ((first_token + i // share) * num_heads + head * share + i % share) * dim * size
        result = operands(kind, target, dim)
        for d in range(dim):
            result[d] = to_operand(kind, row[d] * factor)
