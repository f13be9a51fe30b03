"""The softmax of score rows that cover a whole split of the keys, for :mod:`baton.engine.cpu.attention_tiles` and
:mod:`baton.engine.cpu.attention_few`.

All scores are known, so nothing is rescaled later. A row is read twice: for its largest score, and for its weights,
which replace the scores in place as bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from baton.engine.cpu.emitter import F32, I32, I64, PTR, Emitter
from baton.engine.cpu.key_slots import KEY_CHUNK, SPLIT_KEYS
from baton.engine.cpu.powers import LOG2E, quick_power_of_two
from baton.engine.cpu.tiles import TILE, has_tiles

SCORES_BYTES = 4 * SPLIT_KEYS + 64
"""Bytes from row to row of scores. A power of two would make rows collide in the cache."""
_AT_ONCE = 4
"""Rows processed together, since latency exceeds throughput for a single one."""
_CHUNK_BYTES = 4 * KEY_CHUNK
_MINUS_INFINITY = float("-inf")


@intrinsic(prefer_literal=True)
def _weigh(typing_context, rows, scores, stride, num_chunks, scaling, tops, sums):
    """Computes :func:`weigh_split` for ``rows`` rows."""
    num_rows = rows.literal_value
    signature = types.void(rows, *[types.int64] * 3, types.float32, types.int64, types.int64)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if not has_tiles():
            return context.get_dummy_value()
        e = Emitter(builder)
        vector = ir.VectorType(F32, TILE)
        stride, length = arguments[2:4]
        root, tops_at, sums_at = (builder.inttoptr(arguments[i], PTR) for i in (1, 5, 6))
        roots = [e.at(root, builder.mul(stride, I64(row))) for row in range(num_rows)]

        def larger(first: ir.Value, second: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", first, second), first, second)

        def find(place: ir.Value, row: int, top: ir.Value) -> ir.Value:
            for vector_number in range(KEY_CHUNK // TILE):
                score = e.load(roots[row], vector, builder.add(place, I64(4 * TILE * vector_number)))
                top = larger(score, top)
            return top

        tops = _over_chunks(e, length, [vector([_MINUS_INFINITY] * TILE)] * num_rows, find)
        (folded,) = e.fold(tops, larger)
        factor = builder.fmul(arguments[4], F32(LOG2E))
        slope, shifts = e.splat(factor, TILE), []
        for row in range(num_rows):
            top = builder.extract_element(folded, I32(row))
            e.store(top, tops_at, 4 * row)
            # A row without visible keys: -inf minus a number is -inf, whose weight is zero.
            seen = builder.select(builder.fcmp_ordered(">", top, F32(_MINUS_INFINITY)), top, F32(0.0))
            shifts.append(e.splat(builder.fneg(builder.fmul(factor, seen)), TILE))

        def weigh(place: ir.Value, row: int, total: ir.Value) -> ir.Value:
            for pair in range(KEY_CHUNK // TILE // 2):
                weights = []
                for half in range(2):
                    at = builder.add(place, I64(4 * TILE * (2 * pair + half)))
                    weights.append(quick_power_of_two(e, e.fma(e.load(roots[row], vector, at), slope, shifts[row])))
                # Weights take half of the room, so they never overwrite scores that are still to be read.
                at = builder.add(builder.lshr(place, I64(1)), I64(4 * TILE * pair))
                e.store(e.round_pair(*weights), roots[row], at)
                total = builder.fadd(total, builder.fadd(*weights))
            return total

        totals = _over_chunks(e, length, [vector([0.0] * TILE)] * num_rows, weigh)
        (folded,) = e.fold(totals)
        for row in range(num_rows):
            e.store(builder.extract_element(folded, I32(row)), sums_at, 4 * row)
        return context.get_dummy_value()

    return signature, codegen


def _over_chunks(e: Emitter, length: ir.Value, starts: Sequence[ir.Value], step: Any) -> list[ir.Value]:
    """Emits a loop over chunks: ``step(bytes to the chunk, row, value)`` returns the row's next value."""
    builder, before = e.b, e.b.block
    head, body, done = (builder.append_basic_block(name) for name in ("chunks", "chunk", "rows"))
    end = builder.mul(length, I64(_CHUNK_BYTES))
    builder.branch(head)
    builder.position_at_end(head)
    place = builder.phi(I64)
    values = [builder.phi(start.type) for start in starts]
    place.add_incoming(I64(0), before)
    for value, start in zip(values, starts, strict=True):
        value.add_incoming(start, before)
    builder.cbranch(builder.icmp_unsigned("<", place, end), body, done)
    builder.position_at_end(body)
    stepped = [step(place, row, value) for row, value in enumerate(values)]
    place.add_incoming(builder.add(place, I64(_CHUNK_BYTES)), builder.block)
    for value, after in zip(values, stepped, strict=True):
        value.add_incoming(after, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return values


@njit(error_model="numpy")
def weigh_split(scores, stride, num_rows, num_chunks, scaling, tops, sums):
    """Writes ``weights = exp((scores - top) * scaling)`` over the scores, each row's largest score, and its sum.

    Args:
        scores: address of rows of float32 ``[num_chunks * KEY_CHUNK]``, ``stride`` bytes from one to the next. Weights
            are bfloat16. -inf gets weight zero, NaN stays NaN.
        tops, sums: addresses of float32 ``[num_rows]``. A row of -inf only has the sum 0. Sums are of unrounded
            weights.
    """
    i = 0
    while i + _AT_ONCE <= num_rows:
        _weigh(_AT_ONCE, scores + i * stride, stride, num_chunks, scaling, tops + 4 * i, sums + 4 * i)
        i += _AT_ONCE
    place, top, total = scores + i * stride, tops + 4 * i, sums + 4 * i
    if i + 3 == num_rows:
        _weigh(3, place, stride, num_chunks, scaling, top, total)
    elif i + 2 == num_rows:
        _weigh(2, place, stride, num_chunks, scaling, top, total)
    elif i + 1 == num_rows:
        _weigh(1, place, stride, num_chunks, scaling, top, total)


@intrinsic
def _hide_keys(typing_context, row, first, last):
    """Sets the scores of keys ``[first, last)`` of a row at an address to -inf."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if not has_tiles():
            return context.get_dummy_value()
        e = Emitter(builder)
        root, first, last = builder.inttoptr(arguments[0], PTR), *arguments[1:]
        numbers_of = ir.VectorType(I64, TILE)
        minus_infinity, number = ir.VectorType(F32, TILE)([float("-inf")] * TILE), numbers_of(list(range(TILE)))
        start, before = builder.and_(first, I64(-TILE)), builder.block
        head, body, done = (builder.append_basic_block(name) for name in ("keys", "key", "hidden"))
        builder.branch(head)
        builder.position_at_end(head)
        place = builder.phi(I64)
        place.add_incoming(start, before)
        builder.cbranch(builder.icmp_signed("<", place, last), body, done)
        builder.position_at_end(body)
        keys = builder.add(e.splat(place, TILE), number)
        hidden = builder.and_(
            builder.icmp_signed(">=", keys, e.splat(first, TILE)), builder.icmp_signed("<", keys, e.splat(last, TILE))
        )
        at = e.at(root, builder.mul(place, I64(4)))
        e.call("llvm.masked.store.v16f32.p0", ir.VoidType(), (minus_infinity, at, I32(4), hidden))
        place.add_incoming(builder.add(place, I64(TILE)), builder.block)
        builder.branch(head)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit(error_model="numpy")
def hide(scores, first_row, num_rows, share, visible, before, num_keys):
    """Hides keys that rows must not see: from ``visible`` on, one more for each token, and those ``before``.

    Args:
        scores: address of the first row, which is row ``first_row`` of the item; a token has ``share`` rows.
        num_keys: number of keys, in whole chunks.
    """
    for i in range(num_rows):
        row, end = scores + i * SCORES_BYTES, max(0, visible + (first_row + i) // share)
        if end < num_keys:
            _hide_keys(row, end, num_keys)
        if before > 0:
            _hide_keys(row, 0, min(before, num_keys))
