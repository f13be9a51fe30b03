"""A chunk of attention by a CPU's matrix unit, see :mod:`engine.fused.tiles`.

Queries lie as they are and keys are packed, so that scores come out row by row. They become weights, which are summed
in float32, rounded to operands, and multiplied with values of which two keys' lie interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.fused.arithmetic import add_row, floats, numbers
from engine.fused.emitter import F32, I16, I32, I64, PTR, Emitter, lanes
from engine.fused.powers import LOG2E
from engine.fused.tiles import PAIRS_BYTES, STEP, TILE, has_tiles, multiply

_KEYS_BYTES = PAIRS_BYTES * STEP // 2
# 2**x = sum(c * x**i), Taylor's series: to 4e-6 for |x| <= 1/2, hundreds of times less than rounding to bfloat16 takes.
_POWERS = (1.0, 0.69314718, 0.24022651, 0.055504109, 0.0096181291, 0.0013333558)
_LEAST_POWER = -200.0  # and everything below it is 0


def tile_scratch_floats(num_keys: int, dim: int) -> int:
    """Memory for a chunk, in float32 values: packed keys or values, and what they add to the rows."""
    return num_keys * dim // 2 + 2 * TILE * dim


@intrinsic
def _pack_key_tile(typing_context, keys, ldk, slots, out):
    """32 numbers of each of 16 rows → ``[16, 16, 2]``; ``slots`` is the address of the rows' numbers."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if lanes() != TILE:
            return context.get_dummy_value()
        e = Emitter(builder)
        source, slots, target = (builder.inttoptr(arguments[i], PTR) for i in (0, 2, 3))
        words = ir.VectorType(I32, TILE)
        places = [builder.mul(e.load(slots, I64, 8 * number), arguments[1]) for number in range(TILE)]
        for number, row in enumerate(e.transpose([e.load(source, words, place) for place in places])):
            e.store(row, target, number * PAIRS_BYTES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def _interleave(typing_context, even, odd, out, ldg):
    """32 numbers of each of two rows → ``[2, 16, 2]``, the halves ``ldg`` bytes from each other."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if lanes() != TILE:
            return context.get_dummy_value()
        e = Emitter(builder)
        even, odd, target = (builder.inttoptr(arguments[i], PTR) for i in range(3))
        halves = ir.VectorType(I16, STEP)
        rows = [e.load(source, halves) for source in (even, odd)]
        for half in range(2):
            order = [first + STEP * row for first in range(TILE * half, TILE * half + TILE) for row in range(2)]
            mixed = builder.shuffle_vector(*rows, ir.VectorType(I32, STEP)(order))
            e.store(mixed, target, builder.mul(arguments[3], I64(half)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def weights_of_row(typing_context, scores, count, top, scaling, out):
    """``out = exp((scores - top) * scaling)`` as bfloat16, and the sum of what was rounded; NaN stays NaN.

    Args:
        scores, out: addresses, of ``count`` values, a multiple of 32.
        top: float32, a number.
    """
    size = count.literal_value
    signature = types.float32(types.int64, count, types.float32, types.float32, types.int64)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if not has_tiles():
            return F32(0.0)
        e = Emitter(builder)
        vector = ir.VectorType(F32, TILE)
        source, target = builder.inttoptr(arguments[0], PTR), builder.inttoptr(arguments[4], PTR)
        factor = builder.fmul(arguments[3], F32(LOG2E))
        slope, shift = (e.splat(value, TILE) for value in (factor, builder.fneg(builder.fmul(factor, arguments[2]))))
        every, rounding = ir.IntType(16)(-1), I32(4)
        weights = []
        for first in range(0, size, TILE):
            power = e.fma(e.load(source, vector, 4 * first), slope, shift)
            # Of two operands of which one is NaN, this gives the second.
            floor = vector([_LEAST_POWER] * TILE)
            power = e.call("llvm.x86.avx512.max.ps.512", vector, (floor, power, rounding))
            whole = e.call("llvm.rint.v16f32", vector, (power,))
            rest = builder.fsub(power, whole)
            value = vector([_POWERS[-1]] * TILE)
            for coefficient in _POWERS[-2::-1]:
                value = e.fma(value, rest, vector([coefficient] * TILE))
            name = "llvm.x86.avx512.mask.scalef.ps.512"
            weights.append(e.call(name, vector, (value, whole, value, every, rounding)))
        for number in range(0, len(weights), 2):
            e.store(e.round_pair(weights[number], weights[number + 1]), target, number * 2 * TILE)
        (total,) = e.fold([_sum(builder, weights)])
        return builder.extract_element(total, I32(0))

    return signature, codegen


def _sum(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    total = vectors[0]
    for vector in vectors[1:]:
        total = builder.fadd(total, vector)
    return total


@njit(error_model="numpy")
def _multiply_all(kind, rows, ldr, num_row_groups, x, ldg, num_groups, k, out, ldo):
    """``[16 * num_row_groups, k]`` with packed ``[num_groups, k / 2, 16, 2]``, in float32 rows ``ldo`` bytes apart."""
    down, right = TILE * ldo, 4 * TILE
    i = 0
    while i < num_row_groups:
        row, other = rows + i * TILE * ldr, rows + (i + 1) * TILE * ldr
        j = 0
        while j < num_groups:
            group, place = x + j * ldg, out + i * down + j * right
            if i + 1 < num_row_groups and j + 1 < num_groups:
                multiply(kind, 2, 2, 0, row, other, ldr, group, PAIRS_BYTES, ldg, 0, k, place, ldo, down, right)
            elif i + 1 < num_row_groups:
                multiply(kind, 2, 1, 0, row, other, ldr, group, PAIRS_BYTES, ldg, 0, k, place, ldo, down, right)
            elif j + 1 < num_groups:
                multiply(kind, 1, 2, 0, row, row, ldr, group, PAIRS_BYTES, ldg, 0, k, place, ldo, down, right)
            else:
                multiply(kind, 1, 1, 0, row, row, ldr, group, PAIRS_BYTES, ldg, 0, k, place, ldo, down, right)
            j += 2
        i += 2


@njit(error_model="numpy")
def score_by_tiles(kind, queries, ldq, num_rows, keys, ldk, slots, num_keys, dim, scores, lds, scratch):
    """``scores[i, j] = queries[i] · keys[slots[j]]``, for whole tiles of keys and, beyond ``num_rows``, of queries."""
    ldg = TILE * dim * 2
    for j in range(0, num_keys, TILE):
        for place in range(0, dim, STEP):
            out = scratch + j // TILE * ldg + place // 2 * PAIRS_BYTES
            _pack_key_tile(keys + 2 * place, ldk, slots + 8 * j, out)
    row_groups = (num_rows + TILE - 1) // TILE
    _multiply_all(kind, queries, ldq, row_groups, scratch, ldg, num_keys // TILE, dim, scores, lds)


@njit(error_model="numpy")
def mix_by_tiles(kind, weights, ldw, num_rows, values, ldv, slots_at, num_keys, dim, out, scratch):
    """``out[i] += sum(weights[i, j] * values[slots[j]])``

    Args:
        weights: address of operands, ``ldw`` bytes from row to row; those of keys that fill up 32 must be 0, and rows
            are read until they fill up a tile.
        scratch: address of :func:`tile_scratch_floats` values.
    """
    steps = (num_keys + STEP - 1) // STEP
    ldg = steps * _KEYS_BYTES
    slots = numbers(slots_at, num_keys)
    for pair in range(steps * STEP // 2):
        even = values + slots[min(2 * pair, num_keys - 1)] * ldv
        odd = values + slots[min(2 * pair + 1, num_keys - 1)] * ldv
        for place in range(0, dim, STEP):
            _interleave(even + 2 * place, odd + 2 * place, scratch + place // TILE * ldg + pair * PAIRS_BYTES, ldg)
    k = steps * STEP
    product = scratch + dim // TILE * ldg
    for i in range(0, num_rows, 2 * TILE):
        row_groups = 1 if num_rows - i <= TILE else 2
        _multiply_all(kind, weights + i * ldw, ldw, row_groups, scratch, ldg, dim // TILE, k, product, 4 * dim)
        for row in range(i, min(num_rows, i + 2 * TILE)):
            add_row(floats(out + 4 * dim * row, dim), floats(product + 4 * dim * (row - i), dim))
