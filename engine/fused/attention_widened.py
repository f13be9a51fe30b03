"""Many queries against keys and values of bfloat16 where products of float32 are faster; see engine.fused.emitter.Dot.

A chunk's keys become float32 once for all rows, then its values in their place. The results have the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from engine.fused.arithmetic import floats, numbers, operands, widen_row
from engine.fused.emitter import LONGEST_STEP, is_widened
from engine.fused.key_slots import KEY_CHUNK
from engine.fused.vectors import dot_tile, mix_tile, widen_steps

_WORTH_ROWS = 16
"""Rows that share a chunk's keys, for which it is worth it."""
_F32 = np.float32(0)


@njit(inline="always", error_model="numpy")
def row_scratch_bytes(dim):
    """Memory for one chunk's keys or values: the numbers of its rows from 0 on, then they, as float32."""
    return 8 * KEY_CHUNK + 4 * KEY_CHUNK * dim


def takes_many(kind: Any, num_rows: Any, dim: Any, lanes: Any) -> Any:
    """Whether the other functions of this module have to do with an item of so many rows.

    They need :func:`number_rows` and :func:`widen_queries` once before.
    """
    raise NotImplementedError  # for compiled code only


@overload(takes_many)
def _takes_many_of(kind, num_rows, dim, lanes):
    if not is_widened(kind):
        return lambda kind, num_rows, dim, lanes: False
    return lambda kind, num_rows, dim, lanes: (
        num_rows >= _WORTH_ROWS and dim % (4 * lanes) == 0 and dim % LONGEST_STEP == 0
    )


@njit(error_model="numpy")
def number_rows(memory):
    """Writes the numbers by which rows that lie one behind the other are found."""
    in_order = numbers(memory, KEY_CHUNK)
    for j in range(KEY_CHUNK):
        in_order[j] = j


def widen_queries(*arguments: Any) -> None:
    """Widens all rows of an item.

    Args:
        kind: see :func:`engine.fused.vectors.dot_tile`.
        q: address of the rows; ``ldq``: bytes from one to the next.
        memory: address of :func:`row_scratch_bytes`, and of as many rows of float32 behind.
    """
    raise NotImplementedError  # for compiled code only


@overload(widen_queries)
def _widen_queries_of(kind, q, ldq, num_rows, dim, memory):
    if not is_widened(kind):
        return lambda kind, q, ldq, num_rows, dim, memory: None

    def widen(kind, q, ldq, num_rows, dim, memory):
        for i in range(num_rows):
            widen_steps(kind, q + i * ldq, dim, memory + row_scratch_bytes(dim) + 4 * dim * i)

    return widen


def score_many(*arguments: Any) -> int:
    """Scores whole fours of rows against the keys at ``slots``, and says how many rows these are: none if too few.

    Args:
        first: row of the item with which these begin, of those that :func:`widen_queries` has widened.
        keys, ldk: address of the head's key in slot 0, and bytes from slot to slot.
        num_keys: whole tiles of them.
        scores: address of float32 ``[num_rows, KEY_CHUNK]``.
    """
    raise NotImplementedError  # for compiled code only


@overload(score_many)
def _score_many_of(kind, first, num_rows, keys, ldk, slots, num_keys, dim, scores, memory):
    if not is_widened(kind):
        return lambda kind, first, num_rows, keys, ldk, slots, num_keys, dim, scores, memory: 0

    def score(kind, first, num_rows, keys, ldk, slots, num_keys, dim, scores, memory):
        if num_rows < _WORTH_ROWS:
            return 0
        rows, ld, lds = memory + 8 * KEY_CHUNK, 4 * dim, 4 * KEY_CHUNK
        queries, slot = memory + row_scratch_bytes(dim) + first * ld, numbers(slots, num_keys)
        for j in range(num_keys):
            widen_steps(kind, keys + slot[j] * ldk, dim, rows + j * ld)
        fours = num_rows // 4 * 4
        for i in range(0, fours, 4):
            for j in range(0, num_keys, 4):
                x, w, out = queries + i * ld, rows + j * ld, scores + i * lds + 4 * j
                dot_tile(_F32, _F32, 4, 4, 0, 0, x, ld, w, ld, 0, 0, dim, out, lds)
        return fours

    return score


def mix_many(*arguments: Any) -> int:
    """Adds the weighted values at ``slots`` to whole fours of rows, and says how many rows these are.

    Args:
        weights: address of float32 ``[num_rows, KEY_CHUNK]``.
        out: address of float32 ``[num_rows, dim]``.
    """
    raise NotImplementedError  # for compiled code only


@overload(mix_many)
def _mix_many_of(kind, weights, num_rows, values, ldv, slots, num_keys, dim, lanes, out, memory):
    if not is_widened(kind):
        return lambda kind, weights, num_rows, values, ldv, slots, num_keys, dim, lanes, out, memory: 0

    def mix(kind, weights, num_rows, values, ldv, slots, num_keys, dim, lanes, out, memory):
        if num_rows < _WORTH_ROWS:
            return 0
        rows, ld, ldw, slot = memory + 8 * KEY_CHUNK, 4 * dim, 4 * KEY_CHUNK, numbers(slots, num_keys)
        for j in range(num_keys):
            widen_row(kind, operands(kind, values + slot[j] * ldv, dim), floats(rows + j * ld, dim))
        fours = num_rows // 4 * 4
        for i in range(0, fours, 4):
            for d in range(0, dim, 4 * lanes):
                place, target = rows + 4 * d, out + i * ld + 4 * d
                mix_tile(_F32, 4, 4, weights + i * ldw, ldw, place, ld, memory, num_keys, target, ld)
        return fours

    return mix
