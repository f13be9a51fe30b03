"""Products of weight bands with tokens by a matrix unit, and their output. See :mod:`baton.engine.cpu.tiles`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from baton.engine.cpu.arithmetic import floats, scale_by
from baton.engine.cpu.emitter import F32, I64, PTR, Emitter, lanes
from baton.engine.cpu.tile_bands import band_bytes, band_rows, multiply_alone_int8, scale_columns
from baton.engine.cpu.tiles import (
    PAIR_BYTES,
    PRODUCT_BYTES,
    ROW_BYTES,
    TILE,
    copy_line,
    multiply,
    multiply_pair,
    transpose_tile,
)

_SPARE_PRODUCTS = 5


def tile_product_bytes(widest: int) -> int:
    """Scratch memory of :func:`tile_product`; ``widest``: length of the longest weight row."""
    return _SPARE_PRODUCTS * PRODUCT_BYTES + band_bytes(2, widest)


@intrinsic
def _add_transposed(typing_context, product, out, ldo):
    """Adds a product's columns to 16 rows, ``ldo`` bytes apart."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if lanes() != TILE:
            return context.get_dummy_value()
        e, vector = Emitter(builder), ir.VectorType(F32, TILE)
        source, target = (builder.inttoptr(address, PTR) for address in arguments[:2])
        columns = [e.load(source, vector, number * ROW_BYTES) for number in range(TILE)]
        for number, row in enumerate(e.transpose(columns)):
            at = builder.mul(arguments[2], I64(number))
            e.store(builder.fadd(e.load(target, vector, at), row), target, at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def _add_line(typing_context, source, target):
    """Adds 16 float32 at one address to those at another."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e, vector = Emitter(builder), ir.VectorType(F32, TILE)
        source, target = (builder.inttoptr(address, PTR) for address in arguments)
        e.store(builder.fadd(e.load(target, vector), e.load(source, vector)), target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@njit(error_model="numpy")
def _store(adds, product, num_tokens, out, ldo, spare):
    """Stores a product's columns as rows of tokens, or adds them to these."""
    if num_tokens >= TILE:
        if adds:
            _add_transposed(product, out, ldo)
        else:
            transpose_tile(product, ROW_BYTES, TILE - 1, out, ldo)
        return
    transpose_tile(product, ROW_BYTES, TILE - 1, spare, ROW_BYTES)
    for token in range(num_tokens):
        _store_line(adds, spare + token * ROW_BYTES, out + token * ldo)


@njit(error_model="numpy")
def _store_line(adds, source, target):
    if adds:
        _add_line(source, target)
    else:
        copy_line(source, target)


@njit(error_model="numpy")
def tile_product(kind, adds, x, ldp, num_tokens, weights, first, num_bands, k, out, ldo, scratch):
    """Multiplies one or two bands of 16 rows of a weight with tokens.

    Args:
        adds: whether products are added to ``out``.
        x: address of packed tokens, group after group; ``ldp``: bytes from pair to pair, which show whether it is a
            single token.
        weights, first: see :func:`baton.engine.cpu.tile_bands.band_rows`.
        out: address of float32 ``[num_tokens, 16 * num_bands]``; ``ldo``: bytes from row to row.
        scratch: address of :func:`tile_product_bytes`.
    """
    weight, scales, grouped = weights
    if ldp == PAIR_BYTES and scales and not grouped:
        for row in range(first, first + num_bands * TILE, TILE):
            product_alone_int8(x, weight, scales, row, k, scratch)
            _store_line(adds, scratch, out + 4 * (row - first))
        return
    ldw, ldg, one = 2 * k, k * TILE * 2, TILE * ldp
    spare, copies = scratch + 4 * PRODUCT_BYTES, scratch + _SPARE_PRODUCTS * PRODUCT_BYTES
    w = band_rows(kind, weights, first, num_bands, k, num_tokens, copies, copies + num_bands * TILE * ldw)
    # Weights that are converted to operands first have prefetched the next band already.
    asks, other = scales == 0, w + TILE * ldw
    ask, ask_other = weight + (first + num_bands * TILE) * ldw, weight + (first + (num_bands + 1) * TILE) * ldw
    scaled = 0 if grouped else scales
    for token in range(0, num_tokens, 2 * TILE):
        num_groups = 1 if num_tokens - token <= TILE else 2
        x_rows, is_asked = x + token // TILE * ldg, asks and token == 0
        if num_bands == 2:
            multiply_pair(kind, x_rows, ldp, ldg, num_groups, is_asked, w, other, ldw, ask, ask_other, k, scratch)
        elif num_groups == 2:
            multiply(kind, 1, 2, 0, w, w, ldw, 0, 0, x_rows, ldp, ldg, k, scratch, ldp, one, one)
        elif is_asked:
            multiply(kind, 1, 1, 1, w, w, ldw, ask, 0, x_rows, ldp, ldg, k, scratch, ldp, one, one)
        else:
            multiply(kind, 1, 1, 0, w, w, ldw, 0, 0, x_rows, ldp, ldg, k, scratch, ldp, one, one)
        for band in range(num_bands):
            factors = scaled + 4 * (first + band * TILE) if scaled else 0
            if ldp == PAIR_BYTES:
                _store_line(adds, scratch + band * one, out + band * one)
                continue
            for i in range(num_groups):
                row, product = token + i * TILE, scratch + (band * num_groups + i) * PRODUCT_BYTES
                if factors:
                    scale_columns(product, factors)
                _store(adds, product, num_tokens - row, out + row * ldo + band * ROW_BYTES, ldo, spare)


@njit(error_model="numpy")
def product_alone_int8(x, weight, scales, first, k, out):
    """16 columns of a product of int8 with a single token; tiles are one pair wide.

    Args:
        x: address of operands ``[k]``.
        out: address of float32 ``[16]``, the start of ``PRODUCT_BYTES``, which
            :data:`baton.engine.cpu.tile_bands.ALONE_BYTES` of scratch memory follow.
    """
    multiply_alone_int8(weight + first * k, x, k, out + PRODUCT_BYTES, out)
    scale_by(floats(out, TILE), floats(scales + 4 * first, TILE))
