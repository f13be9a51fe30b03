"""Scores of rows with a chunk of keys, which are used in place, tile by tile."""

from __future__ import annotations

from typing import Any

from numba import njit

from baton.engine.cpu.key_slots import KEY_CHUNK, ask_for
from baton.engine.cpu.vectors import dot_tile
from baton.engine.cpu.widening import tile_kind


@njit(inline="always", error_model="numpy")
def keys_at_once(num_rows):
    """Keys of a tile of :func:`score` for the last of ``num_rows`` rows; a multiple of those for the other rows."""
    rest = num_rows % 4
    return 16 if rest == 1 else 8 if rest == 2 else 4


@njit(error_model="numpy")
def score(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores):
    """``scores[i, j] = queries[i] · keys[slots[j]]``, for whole tiles of keys.

    Args:
        kind: see :func:`baton.engine.cpu.vectors.dot_tile`.
        queries: address of rows in the format of :func:`baton.engine.cpu.widening.tile_kind`; ``ldq``: bytes from one
            to the next.
        keys: address of the operands of slot 0; ``ldk``: bytes from slot to slot.
        slots: address of int64 ``[num_keys]``.
        scores: address of float32 rows of :data:`baton.engine.cpu.key_slots.KEY_CHUNK`.
    """
    lds, x_kind = 4 * KEY_CHUNK, tile_kind(kind)
    i = 0
    while i < num_rows:
        x, out, left = queries + i * ldq, scores + i * lds, num_rows - i
        if left >= 4:
            for j in range(0, num_keys, 4):
                dot_tile(x_kind, kind, 4, 4, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, dim, out + 4 * j, lds)
            i += 4
        elif left == 3:
            for j in range(0, num_keys, 4):
                dot_tile(x_kind, kind, 3, 4, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, dim, out + 4 * j, lds)
            i += 3
        elif left == 2:
            for j in range(0, num_keys, 8):
                dot_tile(x_kind, kind, 2, 8, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, dim, out + 4 * j, lds)
            i += 2
        else:
            for j in range(0, num_keys, 16):
                dot_tile(x_kind, kind, 1, 16, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, dim, out + 4 * j, lds)
            i += 1


def _tiles_scorer(dim: int, num_rows: int, num_keys: int) -> Any:
    """Returns the function for a tile of each head, all of whose sizes are known when it is compiled."""

    @njit(error_model="numpy")
    def score_tiles(kind, rows, cache, slots, scores, ahead):
        queries, ld_head, ldq, num_heads = rows
        keys, ldk, vector_bytes = cache
        num_bytes = num_keys * vector_bytes
        for head in range(num_heads):
            if ahead:
                ask_for(ahead + head * num_bytes, num_bytes)
            q, k, out = queries + head * ld_head, keys + head * vector_bytes, scores + 4 * KEY_CHUNK * num_rows * head
            dot_tile(tile_kind(kind), kind, num_rows, num_keys, 1, 0, q, ldq, k, ldk, slots, 0, dim, out, 4 * KEY_CHUNK)

    return score_tiles


def _heads_scorer(dim: int) -> Any:
    """Returns :func:`score_heads` for heads of size ``dim``."""
    one, two, three, four = (_tiles_scorer(dim, rows, keys_at_once.py_func(rows)) for rows in range(1, 5))

    @njit(error_model="numpy")
    def score_size(kind, num_rows, rows, cache, slots, scores, ahead):
        if num_rows == 1:
            one(kind, rows, cache, slots, scores, ahead)
        elif num_rows == 2:
            two(kind, rows, cache, slots, scores, ahead)
        elif num_rows == 3:
            three(kind, rows, cache, slots, scores, ahead)
        else:
            four(kind, rows, cache, slots, scores, ahead)

    return score_size


_score_heads_64, _score_heads_128 = _heads_scorer(64), _heads_scorer(128)


@njit(inline="always", error_model="numpy")
def takes_heads(num_rows, dim):
    """Whether :func:`score_heads` supports these sizes."""
    return num_rows <= 4 and (dim == 64 or dim == 128)


@njit(error_model="numpy")
def score_heads(kind, num_rows, dim, rows, cache, slots, scores, ahead):
    """Computes a tile of :func:`score` for each of some heads, whose rows fit into one tile.

    Args:
        rows: address of the first head's queries, bytes from head to head and from row to row, and number of heads.
        cache: address of the first head's key in slot 0, bytes from slot to slot, and from head to head.
        slots: address of :func:`keys_at_once` slots.
        scores: address of the first head's scores; those of the next heads follow.
        ahead: address from which as many bytes as are read are prefetched; 0 prefetches nothing.
    """
    if dim == 64:
        _score_heads_64(kind, num_rows, rows, cache, slots, scores, ahead)
    else:
        _score_heads_128(kind, num_rows, rows, cache, slots, scores, ahead)
