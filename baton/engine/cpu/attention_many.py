"""Attention of many queries to a chunk of keys and values, which are prepared once for all of them, with equal bits.

Keys are transposed, see ``key_lanes``. Where float32 products are faster than those of bfloat16 pairs, see
:class:`baton.engine.cpu.dot.Dot`, queries, keys and values become float32 first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from baton.engine.cpu.arithmetic import floats, numbers, operands, widen_row
from baton.engine.cpu.emitter import LONGEST_STEP, is_widened, numbers_at_once
from baton.engine.cpu.emitter import lanes as num_lanes
from baton.engine.cpu.key_lanes import score_tile, transpose_keys
from baton.engine.cpu.key_slots import KEY_CHUNK
from baton.engine.cpu.mixing import mix_tile
from baton.engine.cpu.vectors import dot_tile, is_half, widen_steps

_WORTH_ROWS = 16
"""Minimum number of rows for which preparing a chunk's keys pays."""
_F32 = np.float32(0)


@njit(inline="always", error_model="numpy")
def row_scratch_bytes(dim):
    """Memory for one chunk's keys or values: the numbers of its rows from 0 on, then the rows as float32."""
    return 8 * KEY_CHUNK + 4 * KEY_CHUNK * dim


def takes_many(kind: Any, num_rows: Any, dim: Any, lanes: Any) -> Any:
    """Whether the other functions of this module handle an item of so many rows.

    They need one call of :func:`baton.engine.cpu.key_slots.number_rows` before.
    """
    raise NotImplementedError  # for compiled code only


@overload(takes_many)
def _takes_many_of(kind, num_rows, dim, lanes):
    if not is_widened(kind):
        return lambda kind, num_rows, dim, lanes: num_rows >= _WORTH_ROWS and (dim == 64 or dim == 128)
    return lambda kind, num_rows, dim, lanes: (
        num_rows >= _WORTH_ROWS and dim % (4 * lanes) == 0 and dim % LONGEST_STEP == 0
    )


@njit(error_model="numpy")
def score_many(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores, memory):
    """Scores most rows against the keys at ``slots``; returns their number, 0 if there are too few.

    Args:
        queries: address of the rows in the format of :func:`baton.engine.cpu.widening.tile_kind`; ``ldq``: bytes from
            one to the next.
        keys, ldk: address of the head's key in slot 0, and bytes from slot to slot.
        num_keys: a multiple of the keys of a tile.
        scores: address of float32 ``[num_rows, KEY_CHUNK]``.
    """
    if num_rows < _WORTH_ROWS:
        return 0
    beside = memory + 8 * KEY_CHUNK
    if dim == 64:
        return _score_64(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, scores, beside)
    if dim == 128:
        return _score_128(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, scores, beside)
    return _score_widened(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores, beside)


def _key_bytes(kind: Any, dim: Any) -> int:
    """Bytes of a key that :func:`baton.engine.cpu.key_lanes.transpose_keys` has transposed."""
    raise NotImplementedError  # for compiled code only


@overload(_key_bytes)
def _key_bytes_of(kind, dim):
    half = is_half(kind)
    has_pairs = half and not is_widened(kind) and numbers_at_once(half=True) > num_lanes()
    size = 2 if has_pairs else 4
    return lambda kind, dim: size * dim


def _score_beside(dim: int) -> Any:
    """Returns the function for heads of size ``dim``, which must be known when it is compiled."""
    width = num_lanes()

    @njit(error_model="numpy")
    def score(kind, rows, ld, num_rows, keys, ldk, slots, num_keys, scores, beside):
        lds, key_bytes = 4 * KEY_CHUNK, _key_bytes(kind, dim)
        for j in range(0, num_keys, width):
            transpose_keys(kind, dim, keys, ldk, slots + 8 * j, beside + j * key_bytes)
        pairs, twice = num_rows // 2 * 2, num_keys // (2 * width) * 2 * width
        for i in range(0, pairs, 2):
            x, out = rows + i * ld, scores + i * lds
            for j in range(0, twice, 2 * width):
                score_tile(kind, dim, 2, 2, x, ld, beside + j * key_bytes, out + 4 * j, lds)
            for j in range(twice, num_keys, width):
                score_tile(kind, dim, 2, 1, x, ld, beside + j * key_bytes, out + 4 * j, lds)
        return pairs

    return score


_score_64, _score_128 = _score_beside(64), _score_beside(128)


def _score_widened(*arguments: Any) -> int:
    """Like :func:`score_many`, for heads of other sizes, four rows at a time."""
    raise NotImplementedError  # for compiled code only


@overload(_score_widened)
def _score_widened_of(kind, rows, ld, num_rows, keys, ldk, slots, num_keys, dim, scores, beside):
    if not is_widened(kind):
        return lambda kind, rows, ld, num_rows, keys, ldk, slots, num_keys, dim, scores, beside: 0

    def score(kind, rows, ld, num_rows, keys, ldk, slots, num_keys, dim, scores, beside):
        lds, slot = 4 * KEY_CHUNK, numbers(slots, num_keys)
        for j in range(num_keys):
            widen_steps(kind, keys + slot[j] * ldk, dim, beside + j * ld)
        fours = num_rows // 4 * 4
        for i in range(0, fours, 4):
            for j in range(0, num_keys, 4):
                x, w, out = rows + i * ld, beside + j * ld, scores + i * lds + 4 * j
                dot_tile(_F32, _F32, 4, 4, 0, 0, x, ld, w, ld, 0, 0, dim, out, lds)
        return fours

    return score


def mix_many(*arguments: Any) -> int:
    """Adds the weighted values at ``slots`` to rows, four at a time; returns the number of these rows.

    It is 0 where values need not be widened, or with too few rows.

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
                mix_tile(_F32, 4, 4, 0, weights + i * ldw, ldw, place, ld, memory, num_keys, 0, target, ld)
        return fours

    return mix
