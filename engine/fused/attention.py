"""Attention straight from the paged cache, in one pass over the keys (arXiv 2205.14135).

A work item is one KV head of a few new tokens of one sequence, or several of them where rows are few: a token's keys of
all heads lie side by side, and memory is read at its speed only where it is read in order. The query heads that share a
KV head are rows beside each other, so every key is loaded once for all of them. Keys are visited in chunks that start
at multiples of :data:`KEY_CHUNK`, and summed in splits that start at multiples of :data:`SPLIT_KEYS`, whoever computes
them: a query's result does not depend on its neighbours, nor on the number of threads.

A token of a tree sees its ancestors where a chain's token would see those before it, so that it gets the bits that it
would get without the rest of the tree: where a chunk reaches into the tree, each token has a list of slots of its own.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.fused.arithmetic import (
    floats,
    item_size,
    numbers,
)
from engine.fused.attention_few import attend_split_few, few_scratch_bytes, takes_few
from engine.fused.attention_many import (
    mix_many,
    row_scratch_bytes,
    score_many,
    takes_many,
    widen_queries,
)
from engine.fused.attention_state import highest_at, mass_at, merge_states, state_floats, store_results
from engine.fused.attention_tiles import attend_split_by_tiles, tile_scratch_floats
from engine.fused.int8_rows import row_bytes, unpack_rows
from engine.fused.key_slots import KEY_CHUNK, SPLIT_KEYS, ask_for_rows, fill_path, fill_slots, number_rows
from engine.fused.mixing import mix
from engine.fused.softmax import soften
from engine.fused.tables import Item, Span
from engine.fused.tiles import STEP
from engine.fused.vectors import dot_tile

MAX_ROWS = 64
"""Query rows of a work item."""
_MAX_TILE_ROWS = 128
"""The same for a matrix unit, which gains more by preparing keys and values once for all of them."""
_SCORES_FLOATS = MAX_ROWS * (KEY_CHUNK + 2)
"""Their scores of a chunk, and what :func:`engine.fused.softmax.soften` needs beside."""
_MINUS_INFINITY = np.float32(-np.inf)
_F32 = np.float32(0)


@njit(inline="always", error_model="numpy")
def is_tiled(tiles, dim):
    """Whether a matrix unit attends, if the model has ``tiles``."""
    return tiles != 0 and dim % STEP == 0


def max_rows(tiles: int, dim: int) -> int:
    """Query rows of a work item of one KV head, at most."""
    return _MAX_TILE_ROWS if is_tiled.py_func(tiles, dim) else MAX_ROWS


def scratch_floats(dim: int) -> int:
    """Size of the memory that one thread needs, in float32 values."""
    scores_and_slots, states = _SCORES_FLOATS + 4 * KEY_CHUNK, 2 * _MAX_TILE_ROWS * (dim + 2)
    rows = int(row_scratch_bytes.py_func(dim)) // 4 + MAX_ROWS * dim
    tile_scratch = max(tile_scratch_floats(dim), int(few_scratch_bytes.py_func(dim)) // 4)
    return scores_and_slots + states + rows + tile_scratch


@njit(error_model="numpy")
def _score(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores):
    """``scores[i, j] = queries[i] · keys[slots[j]]``, for whole tiles of keys."""
    lds = 4 * KEY_CHUNK
    i = 0
    while i < num_rows:
        x, out, left = queries + i * ldq, scores + i * lds, num_rows - i
        if left >= 4:
            for j in range(0, num_keys, 4):
                dot_tile(kind, kind, 4, 4, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, dim, out + 4 * j, lds)
            i += 4
        elif left == 3:
            for j in range(0, num_keys, 4):
                dot_tile(kind, kind, 3, 4, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, dim, out + 4 * j, lds)
            i += 3
        elif left == 2:
            for j in range(0, num_keys, 8):
                dot_tile(kind, kind, 2, 8, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, dim, out + 4 * j, lds)
            i += 2
        else:
            for j in range(0, num_keys, 16):
                dot_tile(kind, kind, 1, 16, 1, 0, x, ldq, keys, ldk, slots + 8 * j, 0, dim, out + 4 * j, lds)
            i += 1


@njit(error_model="numpy")
def _hide(scores, num_rows, share, visible, before):
    """Puts out what the rows must not see: places behind them, and those before the first key.

    Args:
        visible: keys of the chunk up to the first token's own.
    """
    for i in range(num_rows):
        row = floats(scores + 4 * KEY_CHUNK * i, KEY_CHUNK)
        for j in range(max(0, visible + i // share), KEY_CHUNK):
            row[j] = _MINUS_INFINITY
        for j in range(min(before, KEY_CHUNK)):
            row[j] = _MINUS_INFINITY


@njit(error_model="numpy")
def _attend_chunk(kind, rows, cache, slots_at, num_keys, visible, before, head, states, memory):
    """Adds a chunk of keys to the states of some rows.

    Args:
        rows: address of the queries, bytes from one to the next, how many there are, and how many a token has.
        cache: addresses of keys and values, and bytes from one token's to the next.
        num_keys: slots to score, whole tiles of them.
        visible: keys up to that of the rows' first token.
        before: keys before the first that may be seen.
        head: its size, a vector's lanes, and what scores are multiplied with.
        states: address of the first row's sums; highest scores and masses of all rows of the item; the first row's
            number among them.
        memory: addresses of the rows' scores; of the numbers from 0 on, which are the slots of a chunk's rows of
            operands, and behind them of memory for these rows, or 0: the cache holds operands; of the same for
            :mod:`engine.fused.attention_many`, or 0: it has nothing to do.
    """
    q, ld_query, num_rows, share = rows
    keys, values, ld_cache = cache
    dim, lanes, scaling = head
    state, highest, mass, first_row = states
    scores, unpacked, many = memory
    lds = 4 * KEY_CHUNK
    count = min(KEY_CHUNK, visible + (num_rows - 1) // share)
    cached_at = slots_at
    if unpacked:
        rows_at = unpacked + 8 * KEY_CHUNK
        unpack_rows(kind, keys, ld_cache, cached_at, num_keys, dim, rows_at)
        keys, ld_rows, slots_at = rows_at, dim * item_size(kind), unpacked
    else:
        rows_at, ld_rows = values, ld_cache
    done = 0
    if many:
        asked = (q, ld_query, first_row, num_rows)
        done = score_many(kind, asked, keys, ld_rows, slots_at, num_keys, dim, scores, many)
    left, place = num_rows - done, scores + lds * done
    _score(kind, q + ld_query * done, ld_query, left, keys, ld_rows, slots_at, num_keys, dim, place)
    if visible < KEY_CHUNK or before > 0:
        _hide(scores, num_rows, share, visible, before)
    tops, sums = highest[first_row : first_row + num_rows], mass[first_row : first_row + num_rows]
    soften(kind, scores, num_rows, dim, scaling, state, tops, sums, scores + lds * MAX_ROWS)
    if unpacked:
        unpack_rows(kind, values, ld_cache, cached_at, count, dim, rows_at)
    done = 0
    if many:
        done = mix_many(kind, scores, num_rows, rows_at, ld_rows, slots_at, count, dim, lanes, state, many)
    left, place, total_at = num_rows - done, scores + lds * done, state + 4 * dim * done
    mix(kind, place, left, rows_at, ld_rows, slots_at, count, dim, lanes, total_at)


@njit(error_model="numpy")
def _attend_split(
    kind, span, item, kv_head, shape, scaling, queries, keys, values, first_split_key, end, state, scratch
):
    """Attends to the keys of one head from ``first_split_key`` up to ``end``, both places; writes the rows' state."""
    num_tokens, num_heads, num_kv_heads, dim, block_size, lanes, tiles, has_int8 = shape
    rows_memory = scratch + 4 * (_SCORES_FLOATS + 4 * KEY_CHUNK + 2 * _MAX_TILE_ROWS * (dim + 2))
    if is_tiled(tiles, dim):
        packed = rows_memory + row_scratch_bytes(dim) + 4 * MAX_ROWS * dim
        attend_split_by_tiles(
            kind,
            span,
            item,
            kv_head,
            shape,
            scaling,
            queries,
            keys,
            values,
            first_split_key,
            end,
            state,
            rows_memory,
            packed,
        )
        return
    unpacked = rows_memory if has_int8 else 0
    share, size = num_heads // num_kv_heads, item_size(kind)
    query, num_rows = item[Item.FIRST], item[Item.COUNT] * share
    many = rows_memory if has_int8 == 0 and takes_many(kind, num_rows, dim, lanes) else 0
    if unpacked or many:
        number_rows(rows_memory)
    place, last, tree_start = span[Span.START] + query, item[Item.END], span[Span.TREE_START]
    scores, slots_at = scratch, scratch + 4 * _SCORES_FLOATS
    other_slots_at = slots_at + 8 * KEY_CHUNK
    blocks = numbers(span[Span.BLOCKS], (place + item[Item.COUNT] + block_size - 1) // block_size)
    highest, mass = floats(highest_at(state, num_rows, dim), num_rows), floats(mass_at(state, num_rows, dim), num_rows)
    highest[:] = _MINUS_INFINITY
    mass[:] = _F32
    floats(state, num_rows * dim)[:] = _F32

    vector_bytes = row_bytes(dim) if has_int8 else dim * size
    ld_query, ld_cache = dim * size, num_kv_heads * vector_bytes
    q = queries + (kv_head * num_tokens + span[Span.FIRST_TOKEN] + query) * share * ld_query
    k, v = keys + kv_head * vector_bytes, values + kv_head * vector_bytes
    cache, head, memory = (k, v, ld_cache), (dim, lanes, scaling), (scores, unpacked, many)
    if many:
        widen_queries(kind, q, ld_query, num_rows, dim, many)
    count = min(KEY_CHUNK, end - first_split_key)
    num_keys = fill_slots(span, blocks, block_size, first_split_key, count, slots_at)
    ask_for_rows(v, ld_cache, slots_at, 0, count, vector_bytes)
    for first_key in range(first_split_key, end, KEY_CHUNK):
        # Rows of one head lie too far apart for the hardware to foresee.
        next_key, next_slots_at, next_num_keys = first_key + KEY_CHUNK, other_slots_at, 0
        if next_key < last:
            count = min(KEY_CHUNK, last - next_key)
            next_num_keys = fill_slots(span, blocks, block_size, next_key, count, next_slots_at)
            ask_for_rows(k, ld_cache, next_slots_at, 0, count, vector_bytes)
            ask_for_rows(v, ld_cache, next_slots_at, 0, count, vector_bytes)
        before = span[Span.FIRST_KEY] - first_key
        if first_key + KEY_CHUNK <= tree_start:
            rows, states = (q, ld_query, num_rows, share), (state, highest, mass, 0)
            visible = place + 1 - first_key
            _attend_chunk(kind, rows, cache, slots_at, num_keys, visible, before, head, states, memory)
        else:
            for token in range(item[Item.COUNT]):
                visible = numbers(span[Span.VISIBLE], query + token + 1)[query + token] - first_key
                if visible > 0:
                    row, count = token * share, min(KEY_CHUNK, visible)
                    num_keys = fill_path(span, query + token, blocks, block_size, first_key, count, slots_at)
                    rows = (q + row * ld_query, ld_query, share, share)
                    states = (state + 4 * dim * row, highest, mass, row)
                    _attend_chunk(kind, rows, cache, slots_at, num_keys, visible, before, head, states, memory)
        slots_at, other_slots_at, num_keys = next_slots_at, slots_at, next_num_keys


@njit(error_model="numpy")
def _attend_heads(
    kind, span, item, shape, scaling, queries, keys, values, first_split_key, end, state, state_bytes, scratch
):
    """:func:`_attend_split` of each head of an item; their states lie ``state_bytes`` apart."""
    num_heads, num_kv_heads, dim, tiles = shape[1], shape[2], shape[3], shape[6]
    if is_tiled(tiles, dim) and takes_few(span, item, num_heads // num_kv_heads, first_split_key, end):
        memory = scratch + 4 * (_SCORES_FLOATS + 4 * KEY_CHUNK + 2 * _MAX_TILE_ROWS * (dim + 2))
        memory += row_scratch_bytes(dim) + 4 * MAX_ROWS * dim
        attend_split_few(
            kind, span, item, shape, scaling, queries, keys, values, first_split_key, end, state, state_bytes, memory
        )
        return
    for head in range(item[Item.HEADS]):
        place, kv_head = state + head * state_bytes, item[Item.HEAD] + head
        _attend_split(
            kind, span, item, kv_head, shape, scaling, queries, keys, values, first_split_key, end, place, scratch
        )


@njit(error_model="numpy")
def _begin(span, first, last):
    """The chunk of a split from which on there is something to see, or ``last``."""
    return min(last, max(first, span[Span.FIRST_KEY] // KEY_CHUNK * KEY_CHUNK))


@njit(error_model="numpy")
def attend(kind, span, item, shape, scaling, queries, keys, values, out, scratch):
    """Computes one work item, or the one split of its keys that the item names.

    Args:
        span, item: rows of the tables, int64 ``[Span.COLUMNS]`` and ``[Item.COLUMNS]``.
        shape: num_tokens, num_heads, num_kv_heads, head dim, block size, lanes, whether there are tiles, whether the
            cache is int8.
        queries: address of operands ``[num_kv_heads, num_tokens, share, head dim]``.
        keys, values: addresses of operands ``[num_slots, num_kv_heads, head dim]``, or of rows of int8, see
            :mod:`engine.fused.int8_rows`.
        out: address of operands ``[num_tokens, num_heads, head dim]``.
        scratch: address of :func:`scratch_floats` values.
    """
    num_heads, dim, share = shape[1], shape[3], shape[1] // shape[2]
    num_rows, end, kv_head = item[Item.COUNT] * share, item[Item.END], item[Item.HEAD]
    state_bytes = 4 * state_floats(num_rows, dim)
    if item[Item.STATE]:
        last = min(end, (item[Item.SPLIT] + 1) * SPLIT_KEYS)
        first = _begin(span, item[Item.SPLIT] * SPLIT_KEYS, last)
        state = item[Item.STATE]
        _attend_heads(kind, span, item, shape, scaling, queries, keys, values, first, last, state, state_bytes, scratch)
        return
    states = scratch + 4 * (_SCORES_FLOATS + 4 * KEY_CHUNK)
    other = states + 4 * _MAX_TILE_ROWS * (dim + 2)
    for first in range(0, end, SPLIT_KEYS):
        last = min(end, first + SPLIT_KEYS)
        begin, state = _begin(span, first, last), states if first == 0 else other
        _attend_heads(kind, span, item, shape, scaling, queries, keys, values, begin, last, state, state_bytes, scratch)
        for head in range(item[Item.HEADS] if first > 0 else 0):
            merge_states(num_rows, dim, scaling, states + head * state_bytes, other + head * state_bytes)
    token = span[Span.FIRST_TOKEN] + item[Item.FIRST]
    for head in range(item[Item.HEADS]):
        store_results(kind, num_rows, dim, states + head * state_bytes, num_heads, kv_head + head, share, token, out)


@njit(error_model="numpy")
def join_splits(kind, span, item, shape, scaling, out):
    """Puts an item together whose splits were computed one by one. :attr:`Item.SPLIT` is their number."""
    num_heads, dim, share = shape[1], shape[3], shape[1] // shape[2]
    num_rows, num_kv_heads = item[Item.COUNT] * share, item[Item.HEADS]
    state_bytes, token = 4 * state_floats(num_rows, dim), span[Span.FIRST_TOKEN] + item[Item.FIRST]
    for head in range(num_kv_heads):
        state = item[Item.STATE] + head * state_bytes
        for split in range(1, item[Item.SPLIT]):
            merge_states(num_rows, dim, scaling, state, state + split * num_kv_heads * state_bytes)
        store_results(kind, num_rows, dim, state, num_heads, item[Item.HEAD] + head, share, token, out)
