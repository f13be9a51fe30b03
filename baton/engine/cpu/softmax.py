"""The softmax of score rows, a chunk at a time: their largest scores, and weights relative to the largest so far.

Several rows are processed together, since latency exceeds throughput for a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from baton.engine.cpu.arithmetic import exp, floats, scale_row
from baton.engine.cpu.emitter import F32, I32, I64, PTR, Combine, Emitter, lanes
from baton.engine.cpu.key_slots import KEY_CHUNK
from baton.engine.cpu.mixing import has_rounded_weights
from baton.engine.cpu.powers import LOG2E, power_of_two

_AT_ONCE = 4
_ROW_BYTES = 4 * KEY_CHUNK
_MINUS_INFINITY = np.float32(-np.inf)
_F32 = np.float32(0)


@intrinsic(prefer_literal=True)
def _largest(typing_context, rows, count, scores, stride, out):
    """The largest number of each of ``rows`` rows of ``count`` float32, ``stride`` bytes apart."""
    num_rows, size = rows.literal_value, count.literal_value
    signature = types.void(rows, count, *[types.int64] * 3)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        vector = ir.VectorType(F32, lanes())

        def larger(first: ir.Value, second: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", first, second), first, second)

        tops = []
        for root in _rows(e, arguments[2], arguments[3], num_rows):
            tops.append(_reduce([e.load(root, vector, 4 * first) for first in range(0, size, lanes())], larger))
        _store_lanes(e, e.fold(tops, larger), num_rows, arguments[4])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def _weigh(typing_context, kind, rows, count, scores, stride, tops, scaling, sums):
    """Computes :func:`weigh_rows` for ``rows`` rows of ``count`` scores, ``stride`` bytes apart."""
    num_rows, size = rows.literal_value, count.literal_value
    rounded = has_rounded_weights(kind)
    signature = types.void(kind, rows, count, *[types.int64] * 3, types.float32, types.int64)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        vector = ir.VectorType(F32, lanes())
        factor = e.splat(builder.fmul(arguments[6], F32(LOG2E)), lanes())
        top_root, totals = builder.inttoptr(arguments[5], PTR), []
        for row, root in enumerate(_rows(e, arguments[3], arguments[4], num_rows)):
            top, weights = e.splat(e.load(top_root, F32, 4 * row), lanes()), []
            for first in range(0, size, lanes()):
                distance = builder.fsub(e.load(root, vector, 4 * first), top)
                weights.append(power_of_two(e, builder.fmul(distance, factor)))
            _store_weights(e, weights, root, rounded=rounded)
            totals.append(_reduce(weights, builder.fadd))
        _store_lanes(e, e.fold(totals), num_rows, arguments[7])
        return context.get_dummy_value()

    return signature, codegen


def _store_weights(e: Emitter, weights: list[ir.Value], row: ir.Value, *, rounded: bool) -> None:
    if rounded:
        for number in range(0, len(weights), 2):
            e.store(e.round_pair(*weights[number : number + 2]), row, 2 * lanes() * number)
        return
    for number, weight in enumerate(weights):
        e.store(weight, row, 4 * lanes() * number)


def _rows(e: Emitter, address: ir.Value, stride: ir.Value, num_rows: int) -> list[ir.Value]:
    root = e.b.inttoptr(address, PTR)
    return [e.at(root, e.b.mul(stride, I64(row))) for row in range(num_rows)]


def _reduce(vectors: list[ir.Value], combine: Combine) -> ir.Value:
    while len(vectors) > 1:
        vectors = [combine(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _store_lanes(e: Emitter, folded: list[ir.Value], count: int, out: ir.Value) -> None:
    (values,) = folded
    target = e.b.inttoptr(out, PTR)
    for lane in range(count):
        e.store(e.b.extract_element(values, I32(lane)), target, 4 * lane)


@njit(error_model="numpy")
def largest_of_rows(scores, num_rows, out):
    """The largest score of each row; unspecified for rows with NaN.

    Args:
        scores: address of float32 ``[num_rows, KEY_CHUNK]``.
        out: address of float32 ``[num_rows]``.
    """
    i = 0
    while i + _AT_ONCE <= num_rows:
        _largest(_AT_ONCE, KEY_CHUNK, scores + i * _ROW_BYTES, _ROW_BYTES, out + 4 * i)
        i += _AT_ONCE
    while i < num_rows:
        _largest(1, KEY_CHUNK, scores + i * _ROW_BYTES, _ROW_BYTES, out + 4 * i)
        i += 1


@njit(error_model="numpy")
def weigh_rows(kind, scores, num_rows, tops, scaling, sums):
    """``scores = exp((scores - top) * scaling)`` in place, and each row's sum; NaN stays NaN.

    Args:
        kind: kind of the values that are weighted; the weights have the format that ``mix`` takes for it. Sums are of
            unrounded weights.
        scores: address of float32 ``[num_rows, KEY_CHUNK]``.
        tops: address of float32 ``[num_rows]``: finite, at least the largest of a row's scores.
        sums: address of float32 ``[num_rows]``.
    """
    i = 0
    while i + _AT_ONCE <= num_rows:
        _weigh(kind, _AT_ONCE, KEY_CHUNK, scores + i * _ROW_BYTES, _ROW_BYTES, tops + 4 * i, scaling, sums + 4 * i)
        i += _AT_ONCE
    while i < num_rows:
        _weigh(kind, 1, KEY_CHUNK, scores + i * _ROW_BYTES, _ROW_BYTES, tops + 4 * i, scaling, sums + 4 * i)
        i += 1


@njit(error_model="numpy")
def soften(kind, scores, num_rows, dim, scaling, state, highest, mass, spare):
    """Converts scores to weights relative to the highest so far, and rescales earlier sums to it.

    Args:
        kind: see :func:`weigh_rows`.
        scores: address of float32 ``[num_rows, KEY_CHUNK]``.
        state: address of the rows' sums, float32 ``[num_rows, dim]``.
        highest, mass: float32 ``[num_rows]``, over all earlier scores.
        spare: address of float32 ``[2, num_rows]``.
    """
    tops_at, sums_at = spare, spare + 4 * num_rows
    tops, sums = floats(tops_at, num_rows), floats(sums_at, num_rows)
    largest_of_rows(scores, num_rows, tops_at)
    for i in range(num_rows):
        top = max(highest[i], tops[i])
        # A row without visible keys yet: -inf minus a number is -inf, whose weight is zero.
        tops[i] = top if top > _MINUS_INFINITY else _F32
    weigh_rows(kind, scores, num_rows, tops_at, scaling, sums_at)
    for i in range(num_rows):
        if sums[i] == _F32:
            continue
        if tops[i] > highest[i]:
            factor = exp((highest[i] - tops[i]) * scaling)
            mass[i] = mass[i] * factor + sums[i]
            scale_row(floats(state + 4 * dim * i, dim), factor)
            highest[i] = tops[i]
        else:
            mass[i] += sums[i]
