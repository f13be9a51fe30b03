"""Attention over the paged cache as Triton kernels: keys and values are read in place, through the block table.

A program computes the queries of one tile for one KV head. A tile is ``block_q`` adjacent new tokens of one sequence;
its rows are these tokens with each of the ``share`` query heads of the KV head, so that every key is loaded once for
all of them. The softmax is computed online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
Dao et al., "FlashAttention", 2022). The keys of a long sequence are divided into pieces, each with programs of its
own, and :func:`merge` combines their results (Dao et al., "Flash-Decoding for long-context inference", 2023). Each
piece has a row of results for every new token of its sequence.

Tiles are assigned without a table: tile ``t`` belongs to the last piece ``p`` with
``first row of p // block_q + p <= t``, and a tile after the end of its piece does nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments that change from batch to batch, for which kernels are not recompiled when one is 1 or divisible by 16.
_OF_BATCH = ["first_piece", "num_pieces", "first_row", "num_rows", "table_width", "tree_width", "ancestor_width"]

_LIFT = tl.constexpr(32768.0)
"""Factor on the weights of int8 values, so that small ones do not underflow float16; the largest still fit."""
_MIN_UNIT = tl.constexpr(1e-30)


@triton.jit(do_not_specialize=_OF_BATCH)
def attend(
    query,  # [num_tokens, num_heads, key_dim], with latents [num_tokens, num_heads, key_dim + value_dim]
    keys,  # [num_slots, num_kv_heads, key_dim], of the query's dtype or int8
    values,  # [num_slots, num_kv_heads, value_dim]
    key_scales,  # with int8: [num_slots, num_kv_heads]
    value_scales,
    output,  # [num_tokens, num_heads, value_dim], contiguous
    partial,  # of divided sequences: [num_rows, num_heads, value_dim]
    stats,  # of divided sequences: [2, num_rows, num_heads], maximum and sum of each row
    sinks,  # [num_heads]
    pieces,  # this and the next five: arrays of a plan, see baton.engine.attention.paged_plan
    sequences,
    tables,
    positions,
    nodes,
    ancestors,
    first_piece,  # pieces [first_piece, first_piece + num_pieces) are computed, rows first_row and following
    num_pieces,
    first_row,
    num_rows,
    table_width,
    tree_width,
    ancestor_width,
    scale,  # factor on the scores, times log2(e) unless they are capped
    softcap,
    query_token_stride,
    query_head_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    key_scale_slot_stride,
    key_scale_head_stride,
    value_scale_slot_stride,
    value_scale_head_stride,
    share: tl.constexpr,  # query heads of a program
    head_groups: tl.constexpr,  # programs that divide the query heads of a KV head
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_size: tl.constexpr,  # tokens per block of the cache
    window: tl.constexpr,  # 0 without a window
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    has_trees: tl.constexpr,
    has_int8: tl.constexpr,
    has_latents: tl.constexpr,  # whether scores are products with keys and values
    is_divided: tl.constexpr,  # whether the keys of any sequence may be divided
    block_q: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_key: tl.constexpr,
    block_value: tl.constexpr,
):
    log2e: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // head_groups
    num_heads = tl.num_programs(1) * share

    low = 0
    high = num_pieces
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = (tl.load(pieces + (first_piece + middle) * 4) - first_row) // block_q + middle
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle)
    piece = pieces + (first_piece + low) * 4
    row = tl.load(piece) - first_row
    seq = tl.load(piece + 1)
    split = tl.load(piece + 2)
    splits = tl.load(piece + 3)
    token = tl.load(sequences + seq * 5)
    num_queries = tl.load(sequences + seq * 5 + 5) - token
    first_query = (tile - row // block_q - low) * block_q
    if (first_query >= num_queries) | (splits == 0):
        return
    start = tl.load(sequences + seq * 5 + 1)
    end = tl.load(sequences + seq * 5 + 2)
    first_key = tl.load(sequences + seq * 5 + 3)
    tree_start = tl.load(sequences + seq * 5 + 4)

    rows = tl.arange(0, block_m)
    queries = first_query + rows // share
    heads = tl.program_id(1) * share + rows % share
    is_row = (rows < block_q * share) & (queries < num_queries)
    tokens = (token + queries).to(tl.int64)
    key_dims = tl.arange(0, block_key)
    value_dims = tl.arange(0, block_value)
    q = tl.load(
        query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + key_dims[None, :],
        mask=is_row[:, None] & (key_dims < key_dim)[None, :],
        other=0.0,
    )
    if has_latents:
        q_latent = tl.load(
            query
            + tokens[:, None] * query_token_stride
            + heads[:, None] * query_head_stride
            + (key_dim + value_dims)[None, :],
            mask=is_row[:, None] & (value_dims < value_dim)[None, :],
            other=0.0,
        )
    query_positions = tl.load(positions + tokens, mask=is_row, other=0) if has_trees else start + queries

    # In a tree, too, a token sees nothing after its place, and no position is before the start of the tree.
    last_key = tl.minimum(end, start + tl.minimum(first_query + block_q, num_queries))
    if window > 0:
        first_key = tl.maximum(first_key, tl.minimum(start + first_query, tree_start) - window + 1)
    first = first_key
    last = last_key
    if is_divided:
        num_steps = tl.cdiv(tl.maximum(last_key - first_key, 0), block_n)
        first = first_key + num_steps * split // splits * block_n
        last = tl.minimum(last_key, first_key + num_steps * (split + 1) // splits * block_n)

    maximum = tl.full([block_m], float("-inf"), dtype=tl.float32)
    total = tl.zeros([block_m], dtype=tl.float32)
    acc = tl.zeros([block_m, block_value], dtype=tl.float32)
    unit = tl.full((), _MIN_UNIT, dtype=tl.float32)  # unit of the accumulated sums
    for step in range(first, last, block_n):
        places = step + tl.arange(0, block_n)
        inside = places < last
        block = tl.load(tables + seq * table_width + places // block_size, mask=inside, other=0)
        slots = block.to(tl.int64) * block_size + places % block_size
        k = tl.load(
            keys + slots[None, :] * key_slot_stride + kv_head * key_head_stride + key_dims[:, None],
            mask=inside[None, :] & (key_dims < key_dim)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if has_int8:  # whole numbers are exact in any dtype
            key_scale = tl.load(
                key_scales + slots * key_scale_slot_stride + kv_head * key_scale_head_stride, mask=inside, other=0.0
            )
            scores *= key_scale[None, :]
        if has_latents:
            v = tl.load(
                values + slots[:, None] * value_slot_stride + kv_head * value_head_stride + value_dims[None, :],
                mask=inside[:, None] & (value_dims < value_dim)[None, :],
                other=0.0,
            )
            products = tl.dot(q_latent, tl.trans(v.to(q.dtype)), input_precision="ieee") * scale
            if has_int8:
                value_scale = tl.load(
                    value_scales + slots * value_scale_slot_stride + kv_head * value_scale_head_stride,
                    mask=inside,
                    other=0.0,
                )
                products *= value_scale[None, :]
            scores += products
        if has_softcap:
            # tanh by one exponential; it has the right limits where that overflows
            scores = softcap * (1 - 2 / (tl.exp(2 / softcap * scores) + 1)) * log2e
        visible = is_row[:, None] & inside[None, :]
        key_positions = places
        if has_trees:
            in_tree = inside & (places >= tree_start)
            node = tl.where(in_tree, places - tree_start, 0)
            key_positions = tl.load(nodes + seq * tree_width + node, mask=in_tree, other=0)
            key_positions = tl.where(in_tree, key_positions, places)
            words = tl.load(
                ancestors + tokens[:, None] * ancestor_width + (node // 32)[None, :],
                mask=is_row[:, None] & in_tree[None, :],
                other=0,
            )
            related = ((words >> (node % 32)[None, :]) & 1) != 0
            visible &= tl.where(in_tree[None, :], related, places[None, :] <= query_positions[:, None])
        else:
            visible &= places[None, :] <= query_positions[:, None]
        if window > 0:
            visible &= key_positions[None, :] > query_positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row may have seen no key yet
        weights = tl.exp2(scores - reference[:, None])
        correction = tl.exp2(maximum - reference)
        total = total * correction + tl.sum(weights, 1)
        if not has_latents:
            v = tl.load(
                values + slots[:, None] * value_slot_stride + kv_head * value_head_stride + value_dims[None, :],
                mask=inside[:, None] & (value_dims < value_dim)[None, :],
                other=0.0,
            )
        if has_int8:
            if not has_latents:
                value_scale = tl.load(
                    value_scales + slots * value_scale_slot_stride + kv_head * value_scale_head_stride,
                    mask=inside,
                    other=0.0,
                )
            # Scales go onto the weights, relative to the largest one so far and lifted, so that they do not underflow
            # float16.
            new_unit = tl.maximum(unit, tl.max(value_scale, 0))
            weights *= (value_scale * (_LIFT / new_unit))[None, :]
            correction *= unit / new_unit
            unit = new_unit
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * correction[:, None], input_precision="ieee")
        maximum = new_maximum

    if has_int8:
        acc *= unit / _LIFT
    is_number = is_row[:, None] & (value_dims < value_dim)[None, :]
    if is_divided and splits > 1:
        own_rows = (row + queries).to(tl.int64) * num_heads + heads
        tl.store(stats + own_rows, maximum, mask=is_row)
        tl.store(stats + num_rows.to(tl.int64) * num_heads + own_rows, total, mask=is_row)
        tl.store(partial + own_rows[:, None] * value_dim + value_dims[None, :], acc, mask=is_number)
    else:
        if has_sinks:
            sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * log2e
            new_maximum = tl.maximum(maximum, sink)
            correction = tl.exp2(maximum - new_maximum)
            total = total * correction + tl.exp2(sink - new_maximum)
            acc = acc * correction[:, None]
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            output + (tokens * num_heads + heads)[:, None] * value_dim + value_dims[None, :],
            acc.to(output.dtype.element_ty),
            mask=is_number,
        )


@triton.jit(do_not_specialize=["first_token", "first_row", "num_rows"])
def merge(
    output,  # [num_tokens, num_heads, value_dim], contiguous
    partial,  # [num_rows, num_heads, value_dim]
    stats,  # [2, num_rows, num_heads]
    sinks,  # [num_heads]
    rows_of_tokens,  # an array of a plan
    first_token,
    first_row,
    num_rows,
    has_sinks: tl.constexpr,
    value_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_splits: tl.constexpr,  # rows that are merged at a time
):
    """Merges the rows of each divided token; one program for each head of each token, starting at ``first_token``."""
    log2e: tl.constexpr = 1.4426950408889634
    token = first_token + tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    first = tl.load(rows_of_tokens + token * 3) - first_row
    stride = tl.load(rows_of_tokens + token * 3 + 1)
    splits = tl.load(rows_of_tokens + token * 3 + 2)
    if splits <= 1:  # attend wrote the output
        return
    dims = tl.arange(0, block_value)
    is_dim = dims < value_dim
    maximum = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    acc = tl.zeros([block_value], dtype=tl.float32)
    for start in range(0, splits, block_splits):
        own = start + tl.arange(0, block_splits)
        is_own = own < splits
        rows = (first + own * stride).to(tl.int64) * num_heads + head
        maxima = tl.load(stats + rows, mask=is_own, other=float("-inf"))
        totals = tl.load(stats + num_rows.to(tl.int64) * num_heads + rows, mask=is_own, other=0.0)
        parts = tl.load(
            partial + rows[:, None] * value_dim + dims[None, :], mask=is_own[:, None] & is_dim[None, :], other=0.0
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(maxima - reference)
        correction = tl.exp2(maximum - reference)
        total = total * correction + tl.sum(weights * totals, 0)
        acc = acc * correction + tl.sum(parts * weights[:, None], 0)
        maximum = new_maximum
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * log2e
        new_maximum = tl.maximum(maximum, sink)
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction + tl.exp2(sink - new_maximum)
        acc *= correction
    merged = acc / tl.where(total > 0, total, 1.0)
    place = (token.to(tl.int64) * num_heads + head) * value_dim
    tl.store(output + place + dims, merged.to(output.dtype.element_ty), mask=is_dim)
