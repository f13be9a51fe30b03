"""Scores of many rows against transposed keys: one lane for each key.

A tile of ``dot_tile`` has its partial sums across the lanes and folds them for each score, which takes as long as the
products where rows are as short as a head. Here a lane has a key and a row's numbers are broadcast. The sums that would
be a tile's lanes are computed one after the other and added up in the order in which they would be folded. So the bits
are the same, without a shuffle; but the keys must be transposed first, which pays only from some number of rows on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.cpu.dot import Dot
from baton.engine.cpu.emitter import F32, I32, I64, PTR, Emitter, lanes, numbers_at_once
from baton.engine.cpu.vectors import is_half


@intrinsic(prefer_literal=True)
def transpose_keys(typing_context, kind, dim, keys, ldk, slots, out):
    """Transposes as many keys as there are lanes, ``keys[slots[j]]``, for :func:`score_tile`.

    Args:
        kind: see :func:`baton.engine.cpu.vectors.dot_tile`.
        dim: a literal, a multiple of :func:`baton.engine.cpu.emitter.numbers_at_once`.
        keys, slots, out: addresses; ``ldk``: bytes from slot to slot. ``out`` has room for ``dim`` float32 per key.
    """
    size, half = dim.literal_value, is_half(kind)
    signature = types.void(kind, dim, *[types.int64] * 4)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e, width = Emitter(builder), lanes()
        dot = Dot(e, half=half, reused=True)
        source, slots, target = (builder.inttoptr(arguments[i], PTR) for i in (2, 4, 5))
        rows = [e.at(source, builder.mul(e.load(slots, I64, 8 * key), arguments[3])) for key in range(width)]
        with cgutils.for_range_slice(builder, I64(0), I64(size), I64(dot.step)) as (place, _):
            loaded = [dot.load(row, place) for row in rows]
            parts = [[_words(e, operand[part]) for operand in loaded] for part in range(len(loaded[0]))]
            first = e.at(target, builder.mul(place, I64(4 * len(parts) * width * width // dot.step)))
            for part, matrix in enumerate(parts):
                for lane, vector in enumerate(e.transpose(matrix)):
                    e.store(vector, first, 4 * width * (lane * len(parts) + part))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def score_tile(typing_context, kind, dim, rows, groups, x, ldx, keys, out, ldo):
    """``out[i, j] = x[i] · keys[j]`` for groups of as many keys as there are lanes, with the bits of a tile.

    Args:
        kind, dim: see :func:`transpose_keys`, which has transposed the keys.
        rows, groups: literals; groups are stored one after the other.
        x: address of rows of operands, or of rows from :func:`baton.engine.cpu.vectors.widen_steps` where
            :func:`baton.engine.cpu.emitter.is_widened` is true.
        out: address of float32; ``ldx``, ``ldo``: bytes from row to row.
    """
    size, num_rows, num_groups, half = dim.literal_value, rows.literal_value, groups.literal_value, is_half(kind)
    signature = types.void(kind, dim, rows, groups, *[types.int64] * 5)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e, width = Emitter(builder), lanes()
        dot, steps = Dot(e, half=half, reused=True), size // numbers_at_once(half=half)
        num_parts = 2 if dot.split else 1
        x_root, key_root, target = (builder.inttoptr(arguments[i], PTR) for i in (4, 6, 7))
        x_rows = [e.at(x_root, builder.mul(arguments[5], I64(row))) for row in range(num_rows)]
        vector = ir.VectorType(F32, width)
        words = ir.VectorType(I32, width) if dot.paired and not dot.split else vector
        group_bytes = 4 * width * width * num_parts * steps

        def lane_sums(lane: int) -> list[ir.Value]:
            totals = [vector([0.0] * width)] * (num_rows * num_groups)
            for step in range(steps):
                at = [4 * width * ((step * width + lane) * num_parts + part) for part in range(num_parts)]
                keys = [
                    [_operand(e, e.load(key_root, words, group * group_bytes + place)) for place in at]
                    for group in range(num_groups)
                ]
                at = [4 * ((step * num_parts + part) * width + lane) for part in range(num_parts)]
                for row, x_row in enumerate(x_rows):
                    numbers = [_operand(e, e.splat(e.load(x_row, words.element, place), width)) for place in at]
                    for group, key in enumerate(keys):
                        number = row * num_groups + group
                        totals[number] = dot.add(totals[number], numbers, key)
            return totals

        def sums(lane: int, apart: int) -> list[ir.Value]:
            """Sums of every ``apart``-th lane, from ``lane`` on."""
            if apart == width:
                return lane_sums(lane)
            halves = sums(lane, 2 * apart), sums(lane + apart, 2 * apart)
            return [builder.fadd(*pair) for pair in zip(*halves, strict=True)]

        for number, total in enumerate(sums(0, 1)):
            row, group = divmod(number, num_groups)
            e.store(total, e.at(target, builder.mul(arguments[8], I64(row))), 4 * width * group)
        return context.get_dummy_value()

    return signature, codegen


def _words(e: Emitter, operand: ir.Value) -> ir.Value:
    """Pairs as integers, which can be shuffled and stored."""
    return operand if operand.type.count == lanes() else e.b.bitcast(operand, ir.VectorType(I32, lanes()))


def _operand(e: Emitter, words: ir.Value) -> ir.Value:
    return e.as_pairs(words) if words.type.element == I32 else words
