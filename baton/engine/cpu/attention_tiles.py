"""Attention by a CPU's matrix unit, see :mod:`baton.engine.cpu.tiles`: all keys of a split at once.

Keys are packed and values interleaved once for all rows of a work item. Then 32 rows at a time are computed from start
to end, so that their scores stay in the first cache: queries are used in place, scores come out row by row, become
weights in place, and are multiplied with the values. A row's result depends neither on the other rows nor on keys that
it cannot see: these have weight zero and add nothing to the matrix unit's sums of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from baton.engine.cpu.arithmetic import floats, numbers
from baton.engine.cpu.attention_state import highest_at, mass_at
from baton.engine.cpu.emitter import I16, I32, I64, PTR, Emitter, lanes
from baton.engine.cpu.int8_rows import row_bytes, unpack_rows
from baton.engine.cpu.key_slots import KEY_CHUNK, SPLIT_KEYS, ask_for_rows, fill_path, fill_slots, number_rows
from baton.engine.cpu.split_softmax import SCORES_BYTES, hide, weigh_split
from baton.engine.cpu.tables import Item, Span
from baton.engine.cpu.tiles import PAIRS_BYTES, STEP, TILE, multiply

_ROWS_AT_ONCE = 2 * TILE
_VALUES_BYTES = PAIRS_BYTES * SPLIT_KEYS // 2
"""Offset from 16 numbers of all values of a split to the next 16."""
_MINUS_INFINITY = np.float32(-np.inf)
_F32 = np.float32(0)


def tile_scratch_floats(dim: int) -> int:
    """Memory for a split, in float32 values: packed keys and values, scores of some rows, and spare results."""
    return SPLIT_KEYS * dim + _ROWS_AT_ONCE * (SCORES_BYTES // 4 + dim)


@intrinsic
def _pack_key_tile(typing_context, keys, ldk, slots, out):
    """32 numbers of each of 16 rows → ``[16, 16, 2]``; ``slots`` is the address of the rows' numbers."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if lanes() != TILE:
            return context.get_dummy_value()
        e = Emitter(builder)
        source, slots, target = (builder.inttoptr(arguments[i], PTR) for i in (0, 2, 3))
        words = ir.VectorType(I32, TILE)
        places = [builder.mul(e.load(slots, I64, 8 * number), arguments[1]) for number in range(TILE)]
        for number, row in enumerate(e.transpose([e.load(source, words, place) for place in places])):
            e.store(row, target, number * PAIRS_BYTES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def interleave(typing_context, even, odd, out, ldg):
    """32 numbers of each of two rows → ``[2, 16, 2]``, with the halves ``ldg`` bytes apart."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if lanes() != TILE:
            return context.get_dummy_value()
        e = Emitter(builder)
        even, odd, target = (builder.inttoptr(arguments[i], PTR) for i in range(3))
        halves = ir.VectorType(I16, STEP)
        rows = [e.load(source, halves) for source in (even, odd)]
        for half in range(2):
            order = [first + STEP * row for first in range(TILE * half, TILE * half + TILE) for row in range(2)]
            mixed = builder.shuffle_vector(*rows, ir.VectorType(I32, STEP)(order))
            e.store(mixed, target, builder.mul(arguments[3], I64(half)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@njit(error_model="numpy")
def _multiply_all(kind, rows, ldr, num_row_groups, x, ldg, num_groups, k, out, ldo):
    """``[16 * num_row_groups, k]`` with packed ``[num_groups, k / 2, 16, 2]``, in float32 rows ``ldo`` bytes apart."""
    down, right = TILE * ldo, 4 * TILE
    i = 0
    while i < num_row_groups:
        row, other = rows + i * TILE * ldr, rows + (i + 1) * TILE * ldr
        j = 0
        while j < num_groups:
            group, place = x + j * ldg, out + i * down + j * right
            if i + 1 < num_row_groups and j + 1 < num_groups:
                multiply(kind, 2, 2, 0, row, other, ldr, 0, 0, group, PAIRS_BYTES, ldg, k, place, ldo, down, right)
            elif i + 1 < num_row_groups:
                multiply(kind, 2, 1, 0, row, other, ldr, 0, 0, group, PAIRS_BYTES, ldg, k, place, ldo, down, right)
            elif j + 1 < num_groups:
                multiply(kind, 1, 2, 0, row, row, ldr, 0, 0, group, PAIRS_BYTES, ldg, k, place, ldo, down, right)
            else:
                multiply(kind, 1, 1, 0, row, row, ldr, 0, 0, group, PAIRS_BYTES, ldg, k, place, ldo, down, right)
            j += 2
        i += 2


@njit(error_model="numpy")
def _prepare_chunk(kind, cache, slots_at, num_keys, count, number, dim, packed, ahead):
    """Packs the keys at ``num_keys`` slots, whole tiles of them, and interleaves the values at the first ``count``.

    Args:
        cache: addresses of the head's keys and values in slot 0, bytes from slot to slot, and, for an int8 cache, the
            address of the numbers from 0 on with memory for a chunk of operands after them, else 0.
        number: number of the chunk in its split.
        packed: address of :func:`tile_scratch_floats` values.
        ahead: address of slots whose keys and values are prefetched, their number, and bytes of a vector. Prefetching
            all of them at once would stall the processor.
    """
    keys, values, ld, unpacked = cache
    keys_ahead, values_ahead, (slots_ahead, count_ahead, vector_bytes) = keys, values, ahead
    at, rows_at = slots_at, unpacked + 8 * KEY_CHUNK
    if unpacked:
        unpack_rows(kind, keys, ld, slots_at, num_keys, dim, rows_at)
        keys, at = rows_at, unpacked
    ldr = 2 * dim if unpacked else ld
    group = packed + number * KEY_CHUNK * 2 * dim
    for j in range(0, num_keys, TILE):
        ask_for_rows(keys_ahead, ld, slots_ahead, j, min(j + TILE, count_ahead), vector_bytes)
        for place in range(0, dim, STEP):
            _pack_key_tile(keys + 2 * place, ldr, at + 8 * j, group + j * 2 * dim + place // 2 * PAIRS_BYTES)
    if unpacked:
        unpack_rows(kind, values, ld, slots_at, count, dim, rows_at)
        values = rows_at
    slots, last = numbers(at, count), count - 1
    group = packed + SPLIT_KEYS * 2 * dim + number * (KEY_CHUNK // 2 * PAIRS_BYTES)
    # The values of a step's padding must be finite, too.
    for pair in range((count + STEP - 1) // STEP * (STEP // 2)):
        ask_for_rows(values_ahead, ld, slots_ahead, 2 * pair, min(2 * pair + 2, count_ahead), vector_bytes)
        even, odd = values + slots[min(2 * pair, last)] * ldr, values + slots[min(2 * pair + 1, last)] * ldr
        for place in range(0, dim, STEP):
            out = group + place // TILE * _VALUES_BYTES + pair * PAIRS_BYTES
            interleave(even + 2 * place, odd + 2 * place, out, _VALUES_BYTES)


@njit(error_model="numpy")
def _attend_rows(kind, rows, seen, head, packed, state):
    """Attends from rows to a prepared split.

    Args:
        rows: address of the queries, number of rows, and rows per token.
        seen: keys up to the first token's own, keys before the first visible one, and keys up to the last one.
        head: its size, and the factor on its scores.
        packed: address of :func:`tile_scratch_floats` values.
        state: addresses of the rows' sums, highest scores and masses, and the number of rows of sums that may be
            written.
    """
    q, num_rows, share = rows
    visible, before, num_keys = seen
    dim, scaling = head
    sums, highest, mass, room = state
    ldq, ldo = 2 * dim, 4 * dim
    values, scores = packed + SPLIT_KEYS * 2 * dim, packed + SPLIT_KEYS * 4 * dim
    spare = scores + _ROWS_AT_ONCE * SCORES_BYTES
    num_chunks = (num_keys + KEY_CHUNK - 1) // KEY_CHUNK
    key_tiles, steps = (num_keys + TILE - 1) // TILE, (num_keys + STEP - 1) // STEP
    for i in range(0, num_rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, num_rows - i)
        tiles = (count + TILE - 1) // TILE
        _multiply_all(kind, q + i * ldq, ldq, tiles, packed, TILE * 2 * dim, key_tiles, dim, scores, SCORES_BYTES)
        hide(scores, i, count, share, visible, before, num_chunks * KEY_CHUNK)
        weigh_split(scores, SCORES_BYTES, count, num_chunks, scaling, highest + 4 * i, mass + 4 * i)
        target = sums + i * ldo if i + tiles * TILE <= room else spare
        _multiply_all(kind, scores, SCORES_BYTES, tiles, values, _VALUES_BYTES, dim // TILE, steps * STEP, target, ldo)
        if target == spare:
            floats(sums + i * ldo, count * dim)[:] = floats(spare, count * dim)


@njit(error_model="numpy")
def attend_split_by_tiles(
    kind, span, item, kv_head, shape, scaling, queries, keys, values, first_split_key, end, state, unpacked, packed
):
    """Attends to the keys of a head from ``first_split_key`` up to ``end``, both places; writes the rows' state.

    Args:
        kind, span, item, shape, scaling, queries, keys, values: see :func:`baton.engine.cpu.attention.attend`.
        state: see :mod:`baton.engine.cpu.attention_state`.
        unpacked: see :func:`_prepare_chunk`; room for two lists of a chunk's slots follows.
        packed: address of :func:`tile_scratch_floats` values.
    """
    num_tokens, num_heads, num_kv_heads, dim, block_size, _, _, has_int8 = shape
    share, query, num_rows = num_heads // num_kv_heads, item[Item.FIRST], item[Item.COUNT] * (num_heads // num_kv_heads)
    place, last, tree_start = span[Span.START] + query, item[Item.END], span[Span.TREE_START]
    blocks = numbers(span[Span.BLOCKS], (place + item[Item.COUNT] + block_size - 1) // block_size)
    slots_at = unpacked + 8 * KEY_CHUNK + 2 * KEY_CHUNK * dim
    other_slots_at = slots_at + 8 * KEY_CHUNK
    vector_bytes = row_bytes(dim) if has_int8 else 2 * dim
    ldq, ld = 2 * dim, num_kv_heads * vector_bytes
    q = queries + (kv_head * num_tokens + span[Span.FIRST_TOKEN] + query) * share * ldq
    k, v = keys + kv_head * vector_bytes, values + kv_head * vector_bytes
    cache, head = (k, v, ld, unpacked if has_int8 else 0), (dim, scaling)
    if has_int8:
        number_rows(unpacked)

    # Chunks before the tree are the same for all tokens.
    count = min(KEY_CHUNK, end - first_split_key)
    num_keys = fill_slots(span, blocks, block_size, first_split_key, count, slots_at)
    ask_for_rows(v, ld, slots_at, 0, count, vector_bytes)
    number, first_key = 0, first_split_key
    while first_key < min(end, tree_start - KEY_CHUNK + 1):
        next_key, next_count, next_num_keys = first_key + KEY_CHUNK, 0, 0
        if next_key < last:
            # Rows of one head are too far apart for the hardware prefetcher.
            next_count = min(KEY_CHUNK, last - next_key)
            next_num_keys = fill_slots(span, blocks, block_size, next_key, next_count, other_slots_at)
        ahead = (other_slots_at, next_count, vector_bytes)
        _prepare_chunk(kind, cache, slots_at, num_keys, count, number, dim, packed, ahead)
        number, first_key, count, num_keys = number + 1, next_key, next_count, next_num_keys
        slots_at, other_slots_at = other_slots_at, slots_at
    before, highest = span[Span.FIRST_KEY] - first_split_key, highest_at(state, num_rows, dim)
    mass = mass_at(state, num_rows, dim)
    if first_key >= end:
        seen = (place + 1 - first_split_key, before, end - first_split_key)
        _attend_rows(kind, (q, num_rows, share), seen, head, packed, (state, highest, mass, num_rows + TILE - 1))
        return
    for token in range(item[Item.COUNT]):
        visible = min(end, numbers(span[Span.VISIBLE], query + token + 1)[query + token]) - first_split_key
        row = token * share
        sums = (state + 4 * dim * row, highest + 4 * row, mass + 4 * row, share)
        if visible <= 0:
            floats(sums[0], share * dim)[:] = _F32
            floats(sums[1], share)[:] = _MINUS_INFINITY
            floats(sums[2], share)[:] = _F32
            continue
        for chunk in range(number, (visible + KEY_CHUNK - 1) // KEY_CHUNK):
            first_key, count = first_split_key + chunk * KEY_CHUNK, min(KEY_CHUNK, visible - chunk * KEY_CHUNK)
            num_keys = fill_path(span, query + token, blocks, block_size, first_key, count, slots_at)
            _prepare_chunk(kind, cache, slots_at, num_keys, count, chunk, dim, packed, (slots_at, 0, vector_bytes))
        seen = (visible, before, visible)
        _attend_rows(kind, (q + row * ldq, share, share), seen, head, packed, sums)
