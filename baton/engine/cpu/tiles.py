"""Products with a CPU's matrix unit (Intel AMX): tiles of 16 rows of 64 bytes, pairs of bfloat16, sums in float32.

A weight's rows are used in place; 16 adjacent ones are one side of a product. Tokens are the other side, 16 at a time,
*packed*: operands ``[k / 2, 16, 2]``, where the numbers ``2 * p`` and ``2 * p + 1`` of each of the 16 tokens are
adjacent. So a product is ``[16 columns, 16 tokens]``. A single token need not be packed: tiles are configured to be one
pair wide then, and a product is ``[16 columns]``. A sum adds its pairs in their order, one after the other, in every
tile and column.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from baton.engine.cpu.emitter import F32, I8, I32, I64, PTR, Emitter, has_features, lanes
from baton.engine.cpu.vectors import is_half

TILE = 16
"""Rows of a tile: columns of a product, or tokens."""
STEP = 32
"""Numbers of a row that a tile holds; tiles are used only for rows whose length is a multiple of it."""
PAIRS_BYTES = 64
"""Bytes from pair to pair of packed tokens."""
PAIR_BYTES = 4
"""Bytes from pair to pair of a single token."""
PRODUCT_BYTES = 4 * TILE * TILE
CONFIGURATION_BYTES = 64
ROW_BYTES = 64
"""Bytes of a row of a tile."""
FEW = 4
"""Weights may have a tile's rows, or fewer by multiples of this."""
_NUM_TILES = 8
_WEIGHTS, _TOKENS = 4, 6  # first tiles for weights and tokens; the tiles before are for sums
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_TILE_DATA = 18


@cache
def has_tiles() -> bool:
    """Whether this process may use the matrix unit; asks the kernel for permission for all threads of the process."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or lanes() != TILE:
        return False
    if not has_features("amx-tile", "amx-bf16"):
        return False
    return int(ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA)) == 0


def tile_configurations() -> npt.NDArray[np.uint8]:
    """Tables for :func:`configure_tiles`: many tokens, a single one, and weights of 4, 8, 12 and 16 rows."""
    tables = np.zeros((2 + TILE // FEW, CONFIGURATION_BYTES), dtype=np.uint8)
    tables[:, 0] = 1
    tables[:, 48 : 48 + _NUM_TILES] = TILE
    widths = tables[:, 16 : 16 + 2 * _NUM_TILES : 2]
    widths[:] = ROW_BYTES
    widths[1, :_WEIGHTS] = widths[1, _TOKENS:] = PAIR_BYTES
    for number, heights in enumerate(tables[2:, 48 : 48 + _TOKENS], 1):
        heights[:] = number * FEW
    return tables


@njit(inline="always", error_model="numpy")
def few_rows_configuration(configurations, num_rows):
    """Address, in ``configurations``, of the one for weights of ``num_rows`` rows, rounded up to a multiple of four."""
    return configurations + (1 + (num_rows + FEW - 1) // FEW) * CONFIGURATION_BYTES


@intrinsic
def configure_tiles(typing_context, address):
    """Configures the calling thread's matrix unit until :func:`release_tiles`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if has_tiles():
            emit_tile(Emitter(builder), "ldtilecfg", builder.inttoptr(arguments[0], PTR))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release_tiles(typing_context):
    """Releases the tiles, so that context switches need not save them."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if has_tiles():
            emit_tile(Emitter(builder), "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def multiply(
    typing_context, kind, weights, groups, asked, w, other, ldw, ask, ask_other, x, ldp, ldg, k, out, ldo, ldv, ldh
):
    """16 rows of ``w``, and of ``other`` if there are two ``weights``, with one or two ``groups`` of tokens.

    A single product is ``[16, 16]``, or ``[16, 1]`` for a single token.

    Args:
        asked: 1 prefetches as much from the addresses ``ask`` and ``ask_other`` on, which need not exist.
        w, other, x, out: addresses; ``ldw``: bytes from row to row of a weight, and of the prefetched rows.
        ldp, ldg: bytes from pair to pair of tokens, and from group to group.
        out: address of float32; ``ldo``: bytes from row to row of a product; ``ldv``, ``ldh``: from one weight's
            products to the other's, and from one group's to the other's.
    """
    num_weights, num_groups = weights.literal_value, groups.literal_value
    asks = bool(asked.literal_value)
    half = is_half(kind)
    signature = types.void(kind, weights, groups, asked, *[types.int64] * 13)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if not (half and has_tiles()):
            return context.get_dummy_value()
        e = Emitter(builder)
        stride, pair_stride, group_stride, length = (arguments[i] for i in (6, 10, 11, 12))
        out_stride, weight_offset, group_offset = arguments[14:]
        rows, next_rows = (
            [builder.inttoptr(arguments[first + i], PTR) for i in range(num_weights)] for first in (4, 7)
        )
        x, out = (builder.inttoptr(arguments[i], PTR) for i in (9, 13))
        sums = [(i, j) for i in range(num_weights) for j in range(num_groups)]
        for number in range(len(sums)):
            emit_tile(e, "tilezero", I8(number))

        before = builder.block
        head, body, done = (builder.append_basic_block(name) for name in ("tiles", "tile", "product"))
        builder.branch(head)
        builder.position_at_end(head)
        place = builder.phi(I64)
        place.add_incoming(I64(0), before)
        builder.cbranch(builder.icmp_unsigned("<", place, length), body, done)

        builder.position_at_end(body)
        across = builder.mul(place, I64(2))
        pairs = e.at(x, builder.mul(builder.lshr(place, I64(1)), pair_stride))
        for i in range(num_weights):
            emit_tile(e, "tileloadd64", I8(_WEIGHTS + i), e.at(rows[i], across), stride)
        for j in range(num_groups):
            emit_tile(e, "tileloadd64", I8(_TOKENS + j), e.at(pairs, builder.mul(group_stride, I64(j))), pair_stride)
        for number, (i, j) in enumerate(sums):
            emit_tile(e, "tdpbf16ps", I8(number), I8(_WEIGHTS + i), I8(_TOKENS + j))
        for next_row in next_rows if asks else ():
            for number in range(TILE):
                line = e.at(e.at(next_row, across), builder.mul(stride, I64(number)))
                e.call("llvm.prefetch.p0", ir.VoidType(), (line, I32(0), I32(1), I32(1)))
        place.add_incoming(builder.add(place, I64(STEP)), builder.block)
        builder.branch(head)

        builder.position_at_end(done)
        for number, (i, j) in enumerate(sums):
            offset = builder.add(builder.mul(weight_offset, I64(i)), builder.mul(group_offset, I64(j)))
            emit_tile(e, "tilestored64", I8(number), e.at(out, offset), out_stride)
        return context.get_dummy_value()

    return signature, codegen


def emit_tile(e: Emitter, name: str, *arguments: ir.Value) -> None:
    """Emits an instruction of the matrix unit."""
    e.call(f"llvm.x86.{name}", ir.VoidType(), arguments)


@intrinsic
def transpose_tile(typing_context, x, ldx, last, out, ldo):
    """Transposes 16 rows of 16 words of 32 bits; rows after ``last`` repeat it; ``ldx``, ``ldo``: bytes."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if lanes() != TILE:
            return context.get_dummy_value()
        e = Emitter(builder)
        x, stride, last, out, out_stride = arguments
        source, target = builder.inttoptr(x, PTR), builder.inttoptr(out, PTR)
        words = ir.VectorType(I32, TILE)
        rows = []
        for number in range(TILE):
            row = builder.select(builder.icmp_signed("<", I64(number), last), I64(number), last)
            rows.append(e.load(source, words, builder.mul(stride, row)))
        for number, row in enumerate(e.transpose(rows)):
            e.store(row, target, builder.mul(out_stride, I64(number)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@njit(error_model="numpy")
def pack_tokens(x, ldx, num_tokens, k, out):
    """Packs operands ``[num_tokens, k]``, at most 16 tokens; the last token fills up the 16."""
    for place in range(0, k, STEP):
        transpose_tile(x + 2 * place, ldx, num_tokens - 1, out + place * TILE * 2, PAIRS_BYTES)


@intrinsic
def copy_line(typing_context, source, target):
    """Copies 16 float32 from one address to another."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        source, target = (builder.inttoptr(address, PTR) for address in arguments)
        e.store(e.load(source, ir.VectorType(F32, TILE)), target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@njit(error_model="numpy")
def multiply_pair(kind, x, ldp, ldg, num_groups, is_first, w, other, ldw, ask, ask_other, k, out):
    """Multiplies two weights' bands with one or two groups of tokens; the first call of a band prefetches the next.

    Args:
        out: address of float32 ``[2, num_groups, 16 columns, 16 tokens]``, or ``[2, 16 columns]`` for a single token.
    """
    one = TILE * ldp
    if num_groups == 1:
        if is_first:
            multiply(kind, 2, 1, 1, w, other, ldw, ask, ask_other, x, ldp, ldg, k, out, ldp, one, one)
        else:
            multiply(kind, 2, 1, 0, w, other, ldw, ask, ask_other, x, ldp, ldg, k, out, ldp, one, one)
    elif is_first:
        multiply(kind, 2, 2, 1, w, other, ldw, ask, ask_other, x, ldp, ldg, k, out, ldp, 2 * one, one)
    else:
        multiply(kind, 2, 2, 0, w, other, ldw, ask, ask_other, x, ldp, ldg, k, out, ldp, 2 * one, one)
