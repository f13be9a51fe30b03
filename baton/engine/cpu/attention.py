"""Attention directly over the paged cache, in one pass over the keys (arXiv 2205.14135).

A work item is one KV head of a few new tokens of one sequence, or several heads where rows are few: a token's keys of
all heads are adjacent, and memory is fast only when it is read in order. The query heads that share a KV head are
adjacent rows, so every key is loaded once for all of them. Keys are visited in chunks that start at multiples of
:data:`KEY_CHUNK`, and summed in splits that start at multiples of :data:`SPLIT_KEYS`, in every item and thread: a
query's result does not depend on its neighbours or on the number of threads.

A token of a tree sees its ancestors where a chain's token would see those before it, so it gets the bits that it would
get without the rest of the tree: where a chunk reaches into the tree, each token has a list of slots of its own.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from baton.engine.cpu.arithmetic import floats, item_size, numbers
from baton.engine.cpu.attention_few import attend_split_few, few_scratch_bytes, takes_few
from baton.engine.cpu.attention_many import mix_many, row_scratch_bytes, score_many, takes_many
from baton.engine.cpu.attention_state import STATE_ROWS, highest_at, mass_at, merge_states, state_floats, store_results
from baton.engine.cpu.attention_tiles import attend_split_by_tiles, tile_scratch_floats
from baton.engine.cpu.emitter import LONGEST_STEP
from baton.engine.cpu.int8_rows import row_bytes, unpack_rows
from baton.engine.cpu.key_slots import KEY_CHUNK, SPLIT_KEYS, ask_for, fill_path, fill_slots, number_rows
from baton.engine.cpu.mixing import mix, weight_bytes
from baton.engine.cpu.scores import keys_at_once, score, score_heads, takes_heads
from baton.engine.cpu.softmax import soften
from baton.engine.cpu.tables import Item, Span
from baton.engine.cpu.tiles import STEP
from baton.engine.cpu.widening import is_kept, whole_steps, widen_rows

MAX_ROWS = 64
"""Limit for the query rows of a work item."""
_MAX_TILE_ROWS = STATE_ROWS
"""The same limit for a matrix unit, which gains more from preparing keys and values once for all rows."""
_SCORES_FLOATS = MAX_ROWS * (KEY_CHUNK + 2)
"""Memory for a chunk's scores, and the spare memory of :func:`baton.engine.cpu.softmax.soften`."""
_LEAD = 16
"""Rows between reading and prefetching. They stay in the first cache where all heads of a token take up to 1 KiB, else
in the second."""
_MINUS_INFINITY = np.float32(-np.inf)
_F32 = np.float32(0)


@njit(inline="always", error_model="numpy")
def is_tiled(tiles, dim):
    """Whether a matrix unit computes attention, if the model has ``tiles``."""
    return tiles != 0 and dim % STEP == 0


def max_rows(tiles: int, dim: int) -> int:
    """Limit for the query rows of a work item, over all its KV heads."""
    return _MAX_TILE_ROWS if is_tiled.py_func(tiles, dim) else MAX_ROWS


def scratch_floats(dim: int) -> int:
    """Memory that one thread needs, in float32 values."""
    scores_and_slots, states = _SCORES_FLOATS + 4 * KEY_CHUNK, 2 * STATE_ROWS * (dim + 2)
    rows = (int(row_scratch_bytes.py_func(dim)) + int(_widened_query_bytes.py_func(dim))) // 4
    tile_scratch = max(tile_scratch_floats(dim), few_scratch_bytes(dim) // 4)
    return scores_and_slots + states + rows + tile_scratch


@njit(error_model="numpy")
def _hide(scores, num_rows, share, visible, before):
    """Hides places after the rows' own, and those before the first key.

    Args:
        visible: keys of the chunk up to the first token's own.
    """
    for i in range(num_rows):
        row = floats(scores + 4 * KEY_CHUNK * i, KEY_CHUNK)
        for j in range(max(0, visible + i // share), KEY_CHUNK):
            row[j] = _MINUS_INFINITY
        for j in range(min(before, KEY_CHUNK)):
            row[j] = _MINUS_INFINITY


@njit(inline="always", error_model="numpy")
def _ahead(slots_at, num_slots, number, rows, next_rows, next_slots_at, asked):
    """Address of the row that is read :data:`_LEAD` rows after ``number``, in these rows or in the next.

    It is 0, for no prefetching, where the item has some heads only, whose rows are not adjacent, and with many rows,
    whose computation takes longer than reading.

    Args:
        asked: bytes from one row to the next, bytes of a head, number of heads, and whether the item has many rows.
    """
    ld_cache, vector_bytes, num_heads, many = asked
    if many or num_heads * vector_bytes < ld_cache:
        return 0
    place = number + _LEAD
    if place < num_slots:
        return rows + ld_cache * numbers(slots_at, KEY_CHUNK)[place]
    return next_rows + ld_cache * numbers(next_slots_at, KEY_CHUNK)[place - num_slots]


@njit(error_model="numpy")
def _score_chunk(kind, rows, cache, slots_at, num_keys, sizes, memory):
    """Scores of some rows of each head with a chunk of keys; see :func:`_attend_chunk`."""
    queries, ld_head, ld_query, num_rows, _, _ = rows
    keys, values, ld_cache, vector_bytes = cache
    num_heads, dim, _, _ = sizes
    scores, unpacked, many = memory
    lds, operand_bytes = 4 * KEY_CHUNK, dim * item_size(kind)
    asked, together = (ld_cache, vector_bytes, num_heads, many), KEY_CHUNK
    if not many:
        together = _LEAD if unpacked else keys_at_once(num_rows)
    for j in range(0, num_keys, together):
        count, slots = min(together, num_keys - j), slots_at + 8 * j
        ahead = _ahead(slots_at, num_keys, j, keys, values, slots_at, asked)
        if many == 0 and unpacked == 0 and takes_heads(num_rows, dim):
            heads, of_keys = (queries, ld_head, ld_query, num_heads), (keys, ld_cache, vector_bytes)
            score_heads(kind, num_rows, dim, heads, of_keys, slots, scores + 4 * j, ahead)
            continue
        for head in range(num_heads):
            if ahead:
                ask_for(ahead + head * count * vector_bytes, count * vector_bytes)
            q, k, out = queries + head * ld_head, keys + head * vector_bytes, scores + head * num_rows * lds + 4 * j
            if unpacked:
                operands = unpacked + 8 * KEY_CHUNK
                unpack_rows(kind, k, ld_cache, slots, count, dim, operands)
                score(kind, q, ld_query, num_rows, operands, operand_bytes, unpacked, count, dim, out)
                continue
            done = 0
            if many:
                done = score_many(kind, q, ld_query, num_rows, k, ld_cache, slots, count, dim, out, many)
            left, q, out = num_rows - done, q + done * ld_query, out + done * lds
            score(kind, q, ld_query, left, k, ld_cache, slots, count, dim, out)


@njit(error_model="numpy")
def _mix_chunk(kind, num_rows, cache, slots_at, next_slots_at, num_keys, sizes, first_sum, state_bytes, memory):
    """Adds a chunk's weighted values to the sums of some rows of each head; see :func:`_attend_chunk`."""
    keys, values, ld_cache, vector_bytes = cache
    num_heads, dim, lanes, _ = sizes
    scores, unpacked, many = memory
    lds, operand_bytes = 4 * KEY_CHUNK, dim * item_size(kind)
    asked, together = (ld_cache, vector_bytes, num_heads, many), KEY_CHUNK if many else _LEAD
    for j in range(0, num_keys, together):
        count, slots = min(together, num_keys - j), slots_at + 8 * j
        ahead = _ahead(slots_at, num_keys, j, values, keys, next_slots_at, asked)
        for head in range(num_heads):
            v, weights = values + head * vector_bytes, scores + head * num_rows * lds + j * weight_bytes(kind)
            sums, asked_at = first_sum + head * state_bytes, ahead + head * count * vector_bytes if ahead else 0
            if unpacked:
                operands = unpacked + 8 * KEY_CHUNK
                if ahead:
                    ask_for(asked_at, count * vector_bytes)
                unpack_rows(kind, v, ld_cache, slots, count, dim, operands)
                mix(kind, weights, num_rows, operands, operand_bytes, unpacked, count, 0, dim, lanes, sums)
                continue
            done = 0
            if many:
                done = mix_many(kind, weights, num_rows, v, ld_cache, slots, count, dim, lanes, sums, many)
            left, weights, sums = num_rows - done, weights + done * lds, sums + 4 * done * dim
            mix(kind, weights, left, v, ld_cache, slots, count, asked_at, dim, lanes, sums)


@njit(error_model="numpy")
def _attend_chunk(kind, rows, cache, slots_at, next_slots_at, num_keys, visible, before, sizes, states, memory):
    """Adds a chunk of keys to the states of some rows of each head.

    Few rows compute less than they read: all heads pass over the same few keys together, then over the values, so that
    memory is read in order. What comes next is prefetched in that order, a few lines at a time; of many at once, a Zen
    3 drops most.

    Args:
        rows: address of the first head's queries in the format of ``tile_kind``, bytes from head to head and from row
            to row, rows of a head in this call, rows of a token, and all rows of a head.
        cache: addresses of the first head's key and value in slot 0, bytes from token to token, and from head to head.
        next_slots_at: slots of the next chunk, or of this one if it is the last.
        num_keys: slots to score, in whole tiles.
        visible: keys up to that of the rows' first token.
        before: keys before the first visible one.
        sizes: number of heads, size of a head, lanes of a vector, and factor on scores.
        states: address of the first head's state, bytes from one to the next, and the number of the first of these rows
            among a head's.
        memory: address of the rows' scores; address of the numbers from 0 on (the slots of a chunk's rows of operands),
            with memory for these rows after them, or 0 if the cache holds operands; the same for
            :mod:`baton.engine.cpu.attention_many`, or 0 if it is not used.
    """
    num_rows, share, all_rows = rows[3], rows[4], rows[5]
    num_heads, dim, _, scaling = sizes
    state, state_bytes, first_row = states
    scores, lds = memory[0], 4 * KEY_CHUNK
    count, first_sum = min(KEY_CHUNK, visible + (num_rows - 1) // share), state + 4 * dim * first_row
    _score_chunk(kind, rows, cache, slots_at, num_keys, sizes, memory)
    for head in range(num_heads):
        weights, head_state = scores + head * num_rows * lds, state + head * state_bytes
        if visible < KEY_CHUNK or before > 0:
            _hide(weights, num_rows, share, visible, before)
        highest = floats(highest_at(head_state, all_rows, dim) + 4 * first_row, num_rows)
        mass = floats(mass_at(head_state, all_rows, dim) + 4 * first_row, num_rows)
        sums = first_sum + head * state_bytes
        soften(kind, weights, num_rows, dim, scaling, sums, highest, mass, scores + lds * MAX_ROWS)
    _mix_chunk(kind, num_rows, cache, slots_at, next_slots_at, count, sizes, first_sum, state_bytes, memory)


@njit(error_model="numpy")
def _queries(kind, queries, ld_head, ld_query, num_heads, num_rows, dim, memory):
    """Address of an item's queries in the format that tiles take, and bytes from head to head and from row to row."""
    if is_kept(kind):
        return queries, ld_head, ld_query
    ld = 4 * whole_steps(kind, dim)
    for head in range(num_heads):
        widen_rows(kind, num_rows, queries + head * ld_head, ld_query, dim, memory + head * num_rows * ld, ld)
    return memory, num_rows * ld, ld


@njit(error_model="numpy")
def _attend_split(
    kind, span, item, shape, scaling, queries, keys, values, first_split_key, end, state, state_bytes, scratch
):
    """Attends to the keys of an item's heads from ``first_split_key`` up to ``end``, both places; writes their states.

    States are ``state_bytes`` apart.
    """
    num_tokens, num_heads, num_kv_heads, dim, block_size, lanes, _, has_int8 = shape
    rows_memory = _row_scratch_at(scratch, dim)
    unpacked = rows_memory if has_int8 else 0
    share, size, num_item_heads = num_heads // num_kv_heads, item_size(kind), item[Item.HEADS]
    query, first_head, num_rows = item[Item.FIRST], item[Item.HEAD], item[Item.COUNT] * share
    many = rows_memory if has_int8 == 0 and takes_many(kind, num_rows, dim, lanes) else 0
    if unpacked or many:
        number_rows(rows_memory)
    place, last, tree_start = span[Span.START] + query, item[Item.END], span[Span.TREE_START]
    scores, slots_at = scratch, scratch + 4 * _SCORES_FLOATS
    other_slots_at = slots_at + 8 * KEY_CHUNK
    blocks = numbers(span[Span.BLOCKS], (place + item[Item.COUNT] + block_size - 1) // block_size)

    vector_bytes = row_bytes(dim) if has_int8 else dim * size
    ld_query, ld_cache = dim * size, num_kv_heads * vector_bytes
    ld_head = num_tokens * share * ld_query
    q = queries + first_head * ld_head + (span[Span.FIRST_TOKEN] + query) * share * ld_query
    k, v = keys + first_head * vector_bytes, values + first_head * vector_bytes
    for head in range(num_item_heads):
        head_state = state + head * state_bytes
        floats(highest_at(head_state, num_rows, dim), num_rows)[:] = _MINUS_INFINITY
        floats(mass_at(head_state, num_rows, dim), num_rows)[:] = _F32
        floats(head_state, num_rows * dim)[:] = _F32
    rows_behind = rows_memory + row_scratch_bytes(dim)
    q, ld_head, ld_query = _queries(kind, q, ld_head, ld_query, num_item_heads, num_rows, dim, rows_behind)
    cache, sizes, memory = (
        (k, v, ld_cache, vector_bytes),
        (num_item_heads, dim, lanes, scaling),
        (scores, unpacked, many),
    )
    count = min(KEY_CHUNK, end - first_split_key)
    num_keys = fill_slots(span, blocks, block_size, first_split_key, count, slots_at)
    for first_key in range(first_split_key, end, KEY_CHUNK):
        next_key, next_slots_at, next_num_keys = first_key + KEY_CHUNK, slots_at, 0
        if next_key < last:
            next_slots_at, other_slots_at = other_slots_at, slots_at
            count = min(KEY_CHUNK, last - next_key)
            next_num_keys = fill_slots(span, blocks, block_size, next_key, count, next_slots_at)
        before = span[Span.FIRST_KEY] - first_key
        if first_key + KEY_CHUNK <= tree_start:
            rows, states = (q, ld_head, ld_query, num_rows, share, num_rows), (state, state_bytes, 0)
            visible = place + 1 - first_key
            _attend_chunk(kind, rows, cache, slots_at, next_slots_at, num_keys, visible, before, sizes, states, memory)
        else:
            for token in range(item[Item.COUNT]):
                visible = numbers(span[Span.VISIBLE], query + token + 1)[query + token] - first_key
                if visible > 0:
                    row, count = token * share, min(KEY_CHUNK, visible)
                    num_keys = fill_path(span, query + token, blocks, block_size, first_key, count, slots_at)
                    rows = (q + row * ld_query, ld_head, ld_query, share, share, num_rows)
                    states = (state, state_bytes, row)
                    _attend_chunk(
                        kind, rows, cache, slots_at, next_slots_at, num_keys, visible, before, sizes, states, memory
                    )
        slots_at, num_keys = next_slots_at, next_num_keys


@njit(inline="always", error_model="numpy")
def _widened_query_bytes(dim):
    """Memory for an item's queries in float32, after that for a chunk's rows."""
    return 4 * MAX_ROWS * (dim + LONGEST_STEP)


@njit(error_model="numpy")
def _row_scratch_at(scratch, dim):
    """Start of a thread's memory for rows of a chunk: after scores, slots and states."""
    return scratch + 4 * (_SCORES_FLOATS + 4 * KEY_CHUNK + 2 * STATE_ROWS * (dim + 2))


@njit(error_model="numpy")
def _attend_heads(
    kind, span, item, shape, scaling, queries, keys, values, first_split_key, end, state, state_bytes, scratch
):
    """Attends to a split in the way that suits the item; the bits are the same as from :func:`_attend_split`."""
    num_heads, num_kv_heads, dim, tiles = shape[1], shape[2], shape[3], shape[6]
    if not is_tiled(tiles, dim):
        _attend_split(
            kind, span, item, shape, scaling, queries, keys, values, first_split_key, end, state, state_bytes, scratch
        )
        return
    rows_memory = _row_scratch_at(scratch, dim)
    packed = rows_memory + row_scratch_bytes(dim) + _widened_query_bytes(dim)
    if takes_few(span, item, num_heads // num_kv_heads, first_split_key, end):
        attend_split_few(
            kind, span, item, shape, scaling, queries, keys, values, first_split_key, end, state, state_bytes, packed
        )
        return
    for head in range(item[Item.HEADS]):
        place, kv_head = state + head * state_bytes, item[Item.HEAD] + head
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
            place,
            rows_memory,
            packed,
        )


@njit(error_model="numpy")
def _begin(span, first, last):
    """Start of the first chunk of a split with a visible key, or ``last``."""
    return min(last, max(first, span[Span.FIRST_KEY] // KEY_CHUNK * KEY_CHUNK))


@njit(error_model="numpy")
def attend(kind, span, item, shape, scaling, queries, keys, values, out, scratch):
    """Computes one work item, or the one split of its keys that the item names.

    Args:
        span, item: rows of the tables, int64 ``[Span.COLUMNS]`` and ``[Item.COLUMNS]``.
        shape: num_tokens, num_heads, num_kv_heads, head dim, block size, lanes, whether there are tiles, whether the
            cache is int8.
        queries: address of operands ``[num_kv_heads, num_tokens, share, head dim]``.
        keys, values: addresses of operands ``[num_slots, num_kv_heads, head dim]``, or of int8 rows, see
            :mod:`baton.engine.cpu.int8_rows`.
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
    other = states + 4 * STATE_ROWS * (dim + 2)
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
    """Joins an item whose splits were computed separately. :attr:`Item.SPLIT` is their number."""
    num_heads, dim, share = shape[1], shape[3], shape[1] // shape[2]
    num_rows, num_kv_heads = item[Item.COUNT] * share, item[Item.HEADS]
    state_bytes, token = 4 * state_floats(num_rows, dim), span[Span.FIRST_TOKEN] + item[Item.FIRST]
    for head in range(num_kv_heads):
        state = item[Item.STATE] + head * state_bytes
        for split in range(1, item[Item.SPLIT]):
            merge_states(num_rows, dim, scaling, state, state + split * num_kv_heads * state_bytes)
        store_results(kind, num_rows, dim, state, num_heads, item[Item.HEAD] + head, share, token, out)
