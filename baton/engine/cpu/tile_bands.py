"""Bands of a weight in the format of a matrix unit: 16 rows of operands, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.cpu.emitter import F32, I8, I32, I64, PTR, Emitter
from baton.engine.cpu.nibbles import GROUP, GROUP_BYTES
from baton.engine.cpu.products import widen_groups, widen_worth
from baton.engine.cpu.tiles import PAIR_BYTES, STEP, TILE, copy_line, emit_tile, has_tiles

_LINE_BYTES = 64
_WORTH_TOKENS = 3 * TILE
_WORTH_BYTES = 2 * 4 * TILE
"""Bytes of the float32 steps and minimums of the rows of an int4 group."""


ALONE_BYTES = 4096
"""Scratch memory of :func:`multiply_alone_int8`, a power of two: four tiles."""


def band_bytes(num_bands: int, k: int) -> int:
    """Memory that :func:`band_rows` needs, rows first."""
    return num_bands * TILE * 2 * k + k // GROUP * _WORTH_BYTES


@njit(error_model="numpy")
def band_rows(kind, weights, first, num_bands, k, num_tokens, out, worth):
    """Returns the address of ``num_bands`` bands as operands ``[16 * num_bands, k]``: in the weight, or at ``out``.

    Weights can be at any address in a file, and tiles whose rows cross cache lines load at half the speed, so such
    weights are copied if there are many tokens. int8 and int4 become operands.

    Args:
        weights: address of the weight and of its scales, and whether it is int4, as for
            :func:`baton.engine.cpu.products.band_product`.
        first: row, a multiple of 16.
        k: a multiple of 32.
        worth: address of memory for the steps and minimums of int4 groups.
    """
    weight, scales, grouped = weights
    if scales == 0:
        w = weight + 2 * first * k
        if w % _LINE_BYTES == 0 or num_tokens < _WORTH_TOKENS:
            return w
        for place in range(0, num_bands * TILE * 2 * k, _LINE_BYTES):
            copy_line(w + place, out + place)
    elif grouped:
        for band in range(num_bands):
            _widen_int4(kind, weight, scales, first // TILE + band, k, out + band * TILE * 2 * k, worth)
    else:
        _widen_int8(weight + first * k, num_bands * TILE * k, out)
    return out


@njit(error_model="numpy")
def _widen_int4(kind, weight, scales, band, k, out, worth):
    groups = k // GROUP
    w, halves = weight + band * groups * GROUP_BYTES, scales + band * groups * _WORTH_BYTES // 2
    widen_worth(halves, groups, worth)
    widen_groups(kind, w, halves, groups, worth, out, 2 * k)


@intrinsic
def _widen_int8(typing_context, w, count, out):
    """Converts ``count`` int8, a multiple of 64, to bfloat16, which is exact; prefetches as many after them."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if not has_tiles():
            return context.get_dummy_value()
        e, count = Emitter(builder), arguments[1]
        source, target = builder.inttoptr(arguments[0], PTR), builder.inttoptr(arguments[2], PTR)
        with cgutils.for_range_slice(builder, I64(0), count, I64(_LINE_BYTES)) as (place, _):
            for first in (0, STEP):
                at = builder.add(place, I64(first))
                e.store(_widened(e, source, at), target, builder.mul(at, I64(2)))
            line = e.at(source, builder.add(place, count))
            e.call("llvm.prefetch.p0", ir.VoidType(), (line, I32(0), I32(2), I32(1)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def multiply_alone_int8(typing_context, w, x, k, spare, out):
    """Multiplies a band of int8 with a single token; the bits equal those of :func:`band_rows` and a product of tiles.

    Rows become operands a tile at a time, while earlier tiles are multiplied.

    Args:
        w, x, out: addresses of int8 ``[16, k]``, of operands ``[k]`` and of float32 ``[16]``.
        spare: address of :data:`ALONE_BYTES`.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if not has_tiles():
            return context.get_dummy_value()
        e, k = Emitter(builder), arguments[2]
        w, x, spare, out = (builder.inttoptr(arguments[i], PTR) for i in (0, 1, 3, 4))
        next_band = e.at(w, builder.mul(k, I64(TILE)))
        emit_tile(e, "tilezero", I8(0))
        with cgutils.for_range_slice(builder, I64(0), k, I64(STEP)) as (place, _):
            tile = e.at(spare, builder.and_(builder.mul(place, I64(2 * TILE)), I64(ALONE_BYTES - 1)))
            for row in range(TILE):
                at = builder.add(place, builder.mul(k, I64(row)))
                e.store(_widened(e, w, at), tile, row * _LINE_BYTES)
            # A step is half a line, so it prefetches for every other row; the next step does for the others.
            odd = builder.and_(builder.lshr(place, I64(5)), I64(1))
            for row in range(0, TILE, 2):
                at = builder.add(place, builder.mul(k, builder.add(I64(row), odd)))
                e.call("llvm.prefetch.p0", ir.VoidType(), (e.at(next_band, at), I32(0), I32(2), I32(1)))
            emit_tile(e, "tileloadd64", I8(4), tile, I64(_LINE_BYTES))
            emit_tile(e, "tileloadd64", I8(6), e.at(x, builder.mul(place, I64(2))), I64(PAIR_BYTES))
            emit_tile(e, "tdpbf16ps", I8(0), I8(4), I8(6))
        emit_tile(e, "tilestored64", I8(0), out, I64(PAIR_BYTES))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _widened(e: Emitter, rows: ir.Value, at: ir.Value) -> ir.Value:
    """32 int8 as bfloat16."""
    halves = []
    for first in (0, TILE):
        raw = e.load(rows, ir.VectorType(I8, TILE), e.b.add(at, I64(first)))
        halves.append(e.b.sitofp(e.b.sext(raw, ir.VectorType(I32, TILE)), ir.VectorType(F32, TILE)))
    return e.round_pair(*halves)


@intrinsic
def scale_columns(typing_context, product, scales):
    """Multiplies a product ``[16 columns, 16 tokens]`` by float32 ``[16]``, column by column, both at addresses."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e, vector = Emitter(builder), ir.VectorType(F32, TILE)
        root, scales = (builder.inttoptr(address, PTR) for address in arguments)
        with cgutils.for_range_slice(builder, I64(0), I64(TILE), I64(1)) as (column, _):
            at = builder.mul(column, I64(4 * TILE))
            scale = e.splat(e.load(scales, F32, builder.mul(column, I64(4))), TILE)
            e.store(builder.fmul(e.load(root, vector, at), scale), root, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
