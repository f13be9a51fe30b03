"""The softmax of a row of scores, a chunk at a time: its largest, and its weights relative to the largest so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.fused.emitter import F32, I32, PTR, Emitter, lanes

_LOG2E = 1.4426950408889634
# 2**x = sum(c * x**i), Taylor's series: to 1.2e-7 for |x| <= 1/2.
_POWERS = (1.0, 0.6931471806, 0.2402265070, 0.0555041087, 0.0096181291, 0.0013333558, 0.0001540353)
_LEAST_POWER = -126.0  # and everything below it is 0
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000
# 1.5 * 2**23: adding it leaves the nearest whole number in the last bits, subtracting it again that number.


@intrinsic(prefer_literal=True)
def largest(typing_context, address, count):
    """The largest of ``count`` float32 at an address, a multiple of the vector's lanes; numbers win over NaN."""
    size = count.literal_value
    signature = types.float32(types.int64, count)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        vector = ir.VectorType(F32, lanes())
        root = builder.inttoptr(arguments[0], PTR)
        values = [e.load(root, vector, 4 * first) for first in range(0, size, lanes())]
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [e.call(f"llvm.maxnum.v{lanes()}f32", vector, pair) for pair in pairs]
        return e.call(f"llvm.vector.reduce.fmax.v{lanes()}f32", F32, values)

    return signature, codegen


@intrinsic(prefer_literal=True)
def weigh_row(typing_context, scores, count, top, scaling):
    """``scores = exp((scores - top) * scaling)`` in place, and their sum; NaN stays NaN.

    Args:
        scores: address of ``count`` float32, a multiple of the vector's lanes.
        top: float32, a number, none of the scores above it.
    """
    size = count.literal_value
    signature = types.float32(types.int64, count, types.float32, types.float32)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        vector = ir.VectorType(F32, lanes())
        root = builder.inttoptr(arguments[0], PTR)
        top = e.splat(arguments[2], lanes())
        factor = e.splat(builder.fmul(arguments[3], F32(_LOG2E)), lanes())
        totals = []
        for first in range(0, size, lanes()):
            distance = builder.fsub(e.load(root, vector, 4 * first), top)
            weight = _power_of_two(e, builder.fmul(distance, factor))
            e.store(weight, root, 4 * first)
            totals.append(weight)
        while len(totals) > 1:
            totals = [builder.fadd(*pair) for pair in zip(totals[::2], totals[1::2], strict=True)]
        (total,) = e.fold(totals)
        return builder.extract_element(total, I32(0))

    return signature, codegen


def _power_of_two(e: Emitter, power: ir.Value) -> ir.Value:
    """2 to the power of float32 that are 0 or less."""
    vector, ints = power.type, ir.VectorType(I32, power.type.count)

    def of(number: float) -> ir.Value:
        return vector([number] * vector.count)

    shifted = e.b.fadd(power, of(_ROUNDER))
    rest = e.b.fsub(power, e.b.fsub(shifted, of(_ROUNDER)))
    value = of(_POWERS[-1])
    for coefficient in _POWERS[-2::-1]:
        value = e.fma(value, rest, of(coefficient))
    bias = 127 - _ROUNDER_BITS
    exponent = e.b.add(e.b.bitcast(shifted, ints), ints([bias & 0xFFFFFFFF] * ints.count))
    scale = e.b.bitcast(e.b.shl(exponent, ints([23] * ints.count)), vector)
    is_low = e.b.fcmp_ordered("<", power, of(_LEAST_POWER))
    return e.b.select(is_low, of(0.0), e.b.fmul(value, scale))
