"""Attention of few rows by a CPU's matrix unit, see :mod:`baton.engine.cpu.tiles`: reads memory once, in its order.

With few rows, computing with a key takes less time than reading it, so memory must never be idle. All heads of an item
pass over a split together, over the keys of 32 tokens and of the next 32, then over the values. What comes next is
prefetched in memory order: a few lines at a time, since many at once stall the computation, and shortly enough before
its use to be still in the first cache.

Packing keys pays only for many rows. Here keys are the side of a product that is used in place, the queries are packed,
and the scores, which come out key by key, are transposed four rows at a time. The matrix unit adds the same pairs in
the same order as in :mod:`baton.engine.cpu.attention_tiles`, so the results are equal bit for bit.
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
from baton.engine.cpu.attention_tiles import interleave
from baton.engine.cpu.emitter import F32, I8, I32, I64, PTR, Emitter, lanes
from baton.engine.cpu.int8_rows import row_bytes, unpack_rows
from baton.engine.cpu.key_slots import KEY_CHUNK, SPLIT_KEYS, fill_slots
from baton.engine.cpu.split_softmax import SCORES_BYTES, hide, weigh_split
from baton.engine.cpu.tables import Item, Span
from baton.engine.cpu.tiles import (
    FEW,
    PAIRS_BYTES,
    PRODUCT_BYTES,
    ROW_BYTES,
    STEP,
    TILE,
    configure_tiles,
    copy_line,
    emit_tile,
    few_rows_configuration,
    has_tiles,
    multiply,
    pack_tokens,
)
from baton.engine.cpu.vectors import prefetch

_LEAD = 48
"""Rows that are prefetched ahead of the computation. Fewer come late, more do not stay in the first cache."""
_LINE = 64
_SUM_LINES = 8
"""Lines that are prefetched during two tiles of products with values."""
MAX_HEADS = 8
"""Limit for the heads of an item."""
_SUMS, _WEIGHTS, _VALUES = 0, 4, 6  # tiles
_F32 = np.float32(0)


@intrinsic
def _turn(typing_context, products, out, ldo):
    """Transposes four columns of ``[16, 16]`` float32 to four rows of 16, ``ldo`` bytes apart."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if lanes() != TILE:
            return context.get_dummy_value()
        e = Emitter(builder)
        source, target = builder.inttoptr(arguments[0], PTR), builder.inttoptr(arguments[1], PTR)
        quarter = ir.VectorType(F32, FEW)

        def keys_from(first: int) -> ir.Value:
            """The values of every fourth key, a quarter of a vector each."""
            parts = [e.load(source, quarter, ROW_BYTES * (FEW * i + first)) for i in range(FEW)]
            halves = [_mixed(builder, parts[i], parts[i + 1], list(range(2 * FEW))) for i in (0, 2)]
            return _mixed(builder, halves[0], halves[1], list(range(TILE)))

        # Transposed quarter by quarter, keys come out in their order.
        keys = [keys_from(first) for first in range(FEW)]
        pairs = [[_mixed(builder, keys[i], keys[i + 1], _in_quarters(order)) for i in (0, 2)] for order in _ONES]
        rows = [_mixed(builder, pair[0], pair[1], _in_quarters(order)) for pair in pairs for order in _TWOS]
        for number, row in enumerate(rows):
            e.store(row, target, builder.mul(arguments[2], I64(number)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


_ONES = ((0, TILE, 1, TILE + 1), (2, TILE + 2, 3, TILE + 3))
_TWOS = ((0, 1, TILE, TILE + 1), (2, 3, TILE + 2, TILE + 3))


def _in_quarters(order: tuple[int, ...]) -> list[int]:
    return [lane + first for first in range(0, TILE, FEW) for lane in order]


def _mixed(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, order: list[int]) -> ir.Value:
    return builder.shuffle_vector(first, second, ir.VectorType(I32, len(order))(order))


@intrinsic
def _add_values(typing_context, weights, values, sums, ldo):
    """Adds products of ``[rows, 32]`` weights with two groups ``[16, 16, 2]`` of values to two ``[rows, 16]`` of sums.

    The tiles' configuration sets the number of rows; rows of weights are ``SCORES_BYTES`` apart, those of sums ``ldo``.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if not has_tiles():
            return context.get_dummy_value()
        e = Emitter(builder)
        weights, values, sums = (builder.inttoptr(address, PTR) for address in arguments[:3])
        emit_tile(e, "tileloadd64", I8(_WEIGHTS), weights, I64(SCORES_BYTES))
        for group in range(2):
            out = e.at(sums, I64(4 * TILE * group))
            emit_tile(e, "tileloadd64", I8(_SUMS + group), out, arguments[3])
            emit_tile(e, "tileloadd64", I8(_VALUES + group), e.at(values, I64(group * _GROUP_BYTES)), I64(PAIRS_BYTES))
            emit_tile(e, "tdpbf16ps", I8(_SUMS + group), I8(_WEIGHTS), I8(_VALUES + group))
            emit_tile(e, "tilestored64", I8(_SUMS + group), out, arguments[3])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


_PRODUCTS_BYTES = 2 * PRODUCT_BYTES
_GROUP_BYTES = PAIRS_BYTES * STEP // 2
"""Offset from 16 numbers of the values of 32 keys to the next 16."""


def few_scratch_bytes(dim: int) -> int:
    """Memory for a split: lists, queries, operands and scores."""
    # Called uncompiled: compiling this function at each start would take half a second.
    of_a_head = int(_queries_bytes.py_func(dim)) + TILE * SCORES_BYTES
    operands = STEP * 2 * dim + max(_PRODUCTS_BYTES, STEP * 2 * dim)
    return _LISTS_BYTES + operands + MAX_HEADS * of_a_head


_LISTS_BYTES = 8 * (2 * SPLIT_KEYS + 3 * SPLIT_KEYS + 8)
"""Slots of two splits, addresses of rows to prefetch, and the progress of prefetching."""


@njit(inline="always", error_model="numpy")
def _queries_bytes(dim):
    """Bytes of a head's packed queries."""
    return TILE * 2 * dim


@njit(inline="always", error_model="numpy")
def takes_few(span, item, share, first_split_key, end):
    """Whether there are few rows, and none of the split's chunks reaches into a tree."""
    last_chunk = first_split_key + (end - 1 - first_split_key) // KEY_CHUNK * KEY_CHUNK
    is_few = item[Item.COUNT] * share <= TILE and item[Item.HEADS] <= MAX_HEADS
    return is_few and last_chunk + KEY_CHUNK <= span[Span.TREE_START]


@njit(error_model="numpy")
def _fill(span, blocks, block_size, first, end, slots_at):
    """Writes the slots of the places ``[first, end)``; returns their number, in whole tiles."""
    num_slots = 0
    for place in range(first, end, KEY_CHUNK):
        count = min(KEY_CHUNK, end - place)
        num_slots = place - first + fill_slots(span, blocks, block_size, place, count, slots_at + 8 * (place - first))
    return num_slots


@njit(error_model="numpy")
def _list_rows(base, ld, slots_at, count, rows_at):
    """Writes the addresses of rows at slots, in their order; returns the address for the next ones."""
    slots, rows = numbers(slots_at, count), numbers(rows_at, count)
    for i in range(count):
        rows[i] = base + slots[i] * ld
    return rows_at + 8 * count


@njit(error_model="numpy")
def _ask(cursor_at, num_lines):
    """Prefetches the next lines of the listed rows.

    Args:
        cursor_at: address of int64: address of the next list entry, end of the list, offset in that row, and bytes of a
            row.
    """
    cursor = numbers(cursor_at, 4)
    row, end, place, num_bytes = cursor[0], cursor[1], cursor[2], cursor[3]
    for _ in range(num_lines):
        if row >= end:
            break
        prefetch(numbers(row, 1)[0] + place)
        place += _LINE
        if place >= num_bytes:
            place, row = 0, row + 8
    cursor[0], cursor[2] = row, place


@njit(error_model="numpy")
def _lie_together(slots, j, block_size):
    """Whether 16 slots are consecutive, as those of a block are."""
    return block_size % TILE == 0 and slots[j + TILE - 1] - slots[j] == TILE - 1


@njit(error_model="numpy")
def _score(kind, cache, slots_at, count, dim, queries, rows, products):
    """Multiplies a head's queries with its keys at 16 or 32 slots.

    Args:
        cache: address of the head's key in slot 0, bytes from one to the next, the cache's block size, and whether it
            is int8.
        queries: address of the packed queries.
        rows: address of room for 32 keys.
        products: address of ``[count, 16]`` float32, written.
    """
    keys, ld, block_size, has_int8 = cache
    slots = numbers(slots_at, count)
    first, stride, last = rows, 2 * dim, count - TILE
    second = rows + last * stride
    if has_int8:
        unpack_rows(kind, keys, ld, slots_at, count, dim, rows)
    elif _lie_together(slots, 0, block_size) and _lie_together(slots, last, block_size):
        first, second, stride = keys + slots[0] * ld, keys + slots[last] * ld, ld
    else:
        for i in range(count):
            for place in range(0, stride, ROW_BYTES):
                copy_line(keys + slots[i] * ld + place, rows + i * stride + place)
    pair, down = PAIRS_BYTES, PRODUCT_BYTES
    if last > 0:
        multiply(kind, 2, 1, 0, first, second, stride, 0, 0, queries, pair, 0, dim, products, ROW_BYTES, down, 0)
    else:
        multiply(kind, 1, 1, 0, first, first, stride, 0, 0, queries, pair, 0, dim, products, ROW_BYTES, 0, 0)


@njit(error_model="numpy")
def _interleave_values(kind, cache, slots_at, count, dim, rows, pairs, asked):
    """Converts a head's values at up to 32 slots to operands ``[dim / 16, 16, 16, 2]`` at ``pairs``.

    Args:
        cache, rows: as in :func:`_score`, for values.
        asked: arguments of :func:`_ask`, which is called for each pair of tokens.
    """
    values, stride, _, has_int8 = cache
    slots, last = numbers(slots_at, count), count - 1
    if has_int8:
        unpack_rows(kind, values, stride, slots_at, count, dim, rows)
        values, stride = rows, 2 * dim
    # Values of weight zero must be finite, too.
    for pair in range(STEP // 2):
        _ask(asked[0], asked[1])
        i, j = min(2 * pair, last), min(2 * pair + 1, last)
        if has_int8 == 0:
            i, j = slots[i], slots[j]
        even, odd = values + i * stride, values + j * stride
        for place in range(0, dim, STEP):
            out = pairs + place // TILE * _GROUP_BYTES + pair * PAIRS_BYTES
            interleave(even + 2 * place, odd + 2 * place, out, _GROUP_BYTES)


@njit(error_model="numpy")
def attend_split_few(
    kind, span, item, shape, scaling, queries, keys, values, first_split_key, end, state, state_bytes, memory
):
    """Attends to the keys of all heads of an item from ``first_split_key`` up to ``end``, both places.

    Args:
        kind, span, item, shape, scaling, queries, keys, values: see :func:`baton.engine.cpu.attention.attend`.
        state: address of the first head's state, ``state_bytes`` from one to the next, all written.
        memory: address of :func:`few_scratch_bytes`.
    """
    num_tokens, num_heads, num_kv_heads, dim, block_size, _, tiles, has_int8 = shape
    share, query, num_item_heads = num_heads // num_kv_heads, item[Item.FIRST], item[Item.HEADS]
    num_rows, place, first_head = item[Item.COUNT] * share, span[Span.START] + query, item[Item.HEAD]
    blocks = numbers(span[Span.BLOCKS], (place + item[Item.COUNT] + block_size - 1) // block_size)
    vector_bytes = row_bytes(dim) if has_int8 else 2 * dim
    ld, num_bytes = num_kv_heads * vector_bytes, num_item_heads * vector_bytes
    k, v = keys + first_head * vector_bytes, values + first_head * vector_bytes

    slots_at, next_slots_at = memory, memory + 8 * SPLIT_KEYS
    asked_at, cursor_at = memory + 16 * SPLIT_KEYS, memory + 40 * SPLIT_KEYS
    rows, queries_bytes = memory + _LISTS_BYTES, _queries_bytes(dim)
    packed = rows + STEP * 2 * dim
    operands = packed + MAX_HEADS * queries_bytes  # products of keys, then pairs of values
    all_scores = operands + max(_PRODUCTS_BYTES, STEP * 2 * dim)
    num_scored = (num_rows + FEW - 1) // FEW * FEW
    scores_bytes = num_scored * SCORES_BYTES

    count, next_end = end - first_split_key, min(item[Item.END], end + SPLIT_KEYS)
    num_slots = _fill(span, blocks, block_size, first_split_key, end, slots_at)
    _fill(span, blocks, block_size, end, next_end, next_slots_at)
    # In reading order: the keys, the values, and the first keys of the next split.
    listed = _list_rows(k, ld, slots_at, count, asked_at)
    listed = _list_rows(v, ld, slots_at, count, listed)
    listed = _list_rows(k, ld, next_slots_at, min(_LEAD, next_end - end), listed)
    cursor = numbers(cursor_at, 4)
    cursor[0], cursor[1], cursor[2], cursor[3] = asked_at, listed, 0, num_bytes
    row_lines = (num_bytes + _LINE - 1) // _LINE
    _ask(cursor_at, _LEAD * row_lines)
    # Lines of 32 rows, divided by the number of prefetching places during a head's 32 rows.
    head_lines = STEP * row_lines // num_item_heads
    key_lines = (head_lines + 3) // 4
    value_lines = (head_lines - _SUM_LINES * (dim // STEP) + STEP // 2 - 1) // (STEP // 2)
    for head in range(num_item_heads):
        q = queries + ((first_head + head) * num_tokens + span[Span.FIRST_TOKEN] + query) * share * 2 * dim
        pack_tokens(q, 2 * dim, num_rows, dim, packed + head * queries_bytes)

    # Scores of all heads for 32 keys at a time, so that memory is read in order.
    for j in range(0, num_slots, STEP):
        num_keys = min(STEP, num_slots - j)
        for head in range(num_item_heads):
            _ask(cursor_at, key_lines)
            cache, q = (k + head * vector_bytes, ld, block_size, has_int8), packed + head * queries_bytes
            _score(kind, cache, slots_at + 8 * j, num_keys, dim, q, rows, operands)
            _ask(cursor_at, key_lines)
            for tile in range(0, num_keys, TILE):
                scores = all_scores + head * scores_bytes + 4 * (j + tile)
                for row in range(0, num_rows, FEW):
                    products = operands + ROW_BYTES * tile + 4 * row
                    _turn(products, scores + row * SCORES_BYTES, SCORES_BYTES)
                _ask(cursor_at, key_lines)

    # Weights replace the scores in place.
    num_chunks = (count + KEY_CHUNK - 1) // KEY_CHUNK
    visible, before = place + 1 - first_split_key, span[Span.FIRST_KEY] - first_split_key
    for head in range(num_item_heads):
        scores, head_state = all_scores + head * scores_bytes, state + head * state_bytes
        hide(scores, 0, num_rows, share, visible, before, num_chunks * KEY_CHUNK)
        highest, mass = highest_at(head_state, num_rows, dim), mass_at(head_state, num_rows, dim)
        weigh_split(scores, SCORES_BYTES, num_rows, num_chunks, scaling, highest, mass)
        floats(head_state, num_scored * dim)[:] = _F32

    # Values. Sums are in memory, since there are too few tiles for all heads' sums.
    configure_tiles(few_rows_configuration(tiles, num_rows))
    for j in range(0, count, STEP):
        for head in range(num_item_heads):
            cache, asked = (v + head * vector_bytes, ld, block_size, has_int8), (cursor_at, value_lines)
            _interleave_values(kind, cache, slots_at + 8 * j, min(STEP, count - j), dim, rows, operands, asked)
            weights, sums = all_scores + head * scores_bytes + 2 * j, state + head * state_bytes
            for number in range(0, dim, STEP):
                _ask(cursor_at, _SUM_LINES)
                _add_values(weights, operands + number // TILE * _GROUP_BYTES, sums + 4 * number, 4 * dim)
    configure_tiles(tiles)
