"""Products with bands of int4; ``quantize_linear_int4`` describes their layout.

Four bits select one of the sixteen values of a row's group. These values are in a register as operands, so neither
products nor sums depend on groups: a row is multiplied as if it were in memory as operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.cpu.dot import Dot
from baton.engine.cpu.emitter import F32, I8, I16, I64, PTR, Emitter, carry, lanes
from baton.engine.cpu.vectors import is_half

GROUP = 32
"""Numbers along a row that share a step and a minimum."""
GROUP_ROWS = 16
"""Rows that are stored together: a band."""
_ROWS_PER_WORD = 4
_LEVELS = 16
_WORDS_BYTES = 2 * GROUP
GROUP_BYTES = GROUP_ROWS * GROUP // 2
"""Bytes of one group of all rows of a band."""


@intrinsic(prefer_literal=True)
def dot_band_int4(typing_context, kind, x, w, worth, k, out):
    """Like :func:`baton.engine.cpu.vectors.dot_tile` for one row of ``x`` and a band, with the bits of its operands.

    Args:
        kind: a uint16 when the operands are bfloat16, a float32 when they are float32.
        x, w, out: addresses, of operands ``[k]``, of the band and of float32 ``[16]``.
        worth: address of float32 ``[groups, 2, 16]``: for each row the step, then the minimum.
    """
    half = is_half(kind)
    signature = types.void(kind, *[types.int64] * 5)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        dot = Dot(e, half=half)
        length = arguments[4]
        x, w, worth, out = (builder.inttoptr(arguments[i], PTR) for i in (1, 2, 3, 5))

        rest = _copy_of_rest(e, dot, x, length)

        def body(place: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            number = builder.udiv(place, I64(GROUP))
            is_whole = builder.icmp_unsigned("<=", builder.add(place, I64(GROUP)), length)
            numbers = builder.select(is_whole, e.at(x, builder.mul(place, I64(dot.item))), rest)
            xs = [dot.load(numbers, I64(first)) for first in range(0, GROUP, dot.step)]
            group = e.at(w, builder.mul(number, I64(GROUP_BYTES)))
            values = e.at(worth, builder.mul(number, I64(2 * 4 * GROUP_ROWS)))
            for row, part, raw in _rows_of_group(e, dot, group, values):
                totals[row] = dot.add(totals[row], xs[part], dot.operand(raw))
            return totals

        starts = [ir.VectorType(F32, lanes())([0.0] * lanes())] * GROUP_ROWS
        totals = carry(e, length, GROUP, starts, body)
        e.store_rows(e.fold(totals), 1, GROUP_ROWS, out, I64(0))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def widen_group_int4(typing_context, kind, w, worth, out, ldo):
    """Converts one group of a band to operands ``[16, 32]``.

    Args:
        kind, w, worth: as for :func:`dot_band_int4`, but of this group.
        out: address; ``ldo``: bytes from row to row.
    """
    half = is_half(kind)
    signature = types.void(kind, *[types.int64] * 4)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        dot = Dot(e, half=half)
        w, worth, out = (builder.inttoptr(arguments[i], PTR) for i in (1, 2, 3))
        for row, part, raw in _rows_of_group(e, dot, w, worth):
            e.store(raw, e.at(out, builder.mul(arguments[4], I64(row))), part * dot.step * dot.item)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def widen_halves(typing_context, address, out):
    """Converts sixteen float16 at an address to float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        source, target = (builder.inttoptr(argument, PTR) for argument in arguments)
        e.store(e.widen_half(e.load(source, ir.VectorType(I16, GROUP_ROWS))), target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _copy_of_rest(e: Emitter, dot: Dot, x: ir.Value, length: ir.Value) -> ir.Value:
    """Copies the numbers of ``x`` after its last whole group, padded with zeros to a group; returns their address."""
    buffer, rest = e.room_for(ir.ArrayType(I8, GROUP * dot.item)), e.b.and_(length, I64(GROUP - 1))
    cgutils.raw_memcpy(e.b, buffer, e.at(x, e.b.mul(e.b.sub(length, rest), I64(dot.item))), rest, dot.item)
    return buffer


def _rows_of_group(e: Emitter, dot: Dot, w: ir.Value, worth: ir.Value) -> Iterator[tuple[int, int, ir.Value]]:
    """Yields a step of each row as it would be in memory: the row, the number of the step, and the vector."""
    for part in range(GROUP // dot.step):
        for row in range(GROUP_ROWS):
            word, number = divmod(row, _ROWS_PER_WORD)
            kind = ir.VectorType(I16, dot.step)
            words = e.load(w, kind, word * _WORDS_BYTES + 2 * part * dot.step)
            shifted = e.b.lshr(words, kind([4 * number] * dot.step)) if number else words
            step = e.load(worth, F32, 4 * row)
            least = e.load(worth, F32, 4 * (GROUP_ROWS + row))
            yield row, part, _look_up(e, shifted, step, least) if dot.paired else _compute(e, dot, shifted, step, least)


def _look_up(e: Emitter, words: ir.Value, step: ir.Value, least: ir.Value) -> ir.Value:
    """Selects values from a table, which is doubled since five bits of a word select, the last being another row's."""
    levels = ir.VectorType(F32, _LEVELS)([float(level) for level in range(_LEVELS)])
    values = e.fma(levels, e.splat(step, _LEVELS), e.splat(least, _LEVELS))
    table = e.b.bitcast(e.round_pair(values, values), words.type)
    return e.call("llvm.x86.avx512.permvar.hi.512", words.type, (table, words))


def _compute(e: Emitter, dot: Dot, words: ir.Value, step: ir.Value, least: ir.Value) -> ir.Value:
    count = words.type.count
    levels = e.b.uitofp(e.b.and_(words, words.type([_LEVELS - 1] * count)), ir.VectorType(F32, count))
    values = e.fma(levels, e.splat(step, count), e.splat(least, count))
    return e.round(values) if dot.half else e.b.bitcast(values, dot.raw)
