"""Scores of rows with a chunk of keys where they lie, tile by tile."""

from __future__ import annotations

from typing import Any

from numba import njit

from engine.fused.key_slots import KEY_CHUNK
from engine.fused.vectors import dot_tile
from engine.fused.widening import tile_kind


@njit(inline="always", error_model="numpy")
def keys_at_once(num_rows):
    """Keys of a tile of :func:`score` for the last of some rows; those of the others divide them."""
    rest = num_rows % 4
    return 16 if rest == 1 else 8 if rest == 2 else 4


def _scorer(size: int) -> Any:
    """:func:`score` for heads of that size, or 0: any. A product of known length is a straight line of code."""

    @njit(error_model="numpy")
    def score_heads(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores):
        lds, x_kind, k = 4 * KEY_CHUNK, tile_kind(kind), size if size else dim
        i = 0
        while i < num_rows:
            x, out, left = queries + i * ldq, scores + i * lds, num_rows - i
            if left >= 4:
                for j in range(0, num_keys, 4):
                    dot_tile(x_kind, kind, 4, 4, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, k, out + 4 * j, lds)
                i += 4
            elif left == 3:
                for j in range(0, num_keys, 4):
                    dot_tile(x_kind, kind, 3, 4, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, k, out + 4 * j, lds)
                i += 3
            elif left == 2:
                for j in range(0, num_keys, 8):
                    dot_tile(x_kind, kind, 2, 8, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, k, out + 4 * j, lds)
                i += 2
            else:
                for j in range(0, num_keys, 16):
                    dot_tile(x_kind, kind, 1, 16, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, k, out + 4 * j, lds)
                i += 1

    return score_heads


_score_64, _score_128, _score_any = _scorer(64), _scorer(128), _scorer(0)


@njit(error_model="numpy")
def score(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores):
    """``scores[i, j] = queries[i] · keys[slots[j]]``, for whole tiles of keys.

    Args:
        kind: see :func:`engine.fused.vectors.dot_tile`.
        queries: address of rows as :func:`engine.fused.widening.tile_kind` has them; ``ldq``: bytes from one to the
            next.
        keys: address of the operands of slot 0; ``ldk``: bytes from slot to slot.
        slots: address of int64 ``[num_keys]``.
        scores: address of float32 rows of :data:`engine.fused.key_slots.KEY_CHUNK`.
    """
    if dim == 64:
        _score_64(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores)
    elif dim == 128:
        _score_128(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores)
    else:
        _score_any(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores)
