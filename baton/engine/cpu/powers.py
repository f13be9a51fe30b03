"""Powers of two of a vector as emitted code: in float32 precision, and faster for results that become bfloat16."""

from __future__ import annotations

from llvmlite import ir

from baton.engine.cpu.emitter import I32, Emitter

LOG2E = 1.4426950408889634
# 2**x = sum(c * x**i), Taylor's series: to 1.2e-7 for |x| <= 1/2.
_POWERS = (1.0, 0.6931471806, 0.2402265070, 0.0555041087, 0.0096181291, 0.0013333558, 0.0001540353)
_LEAST_POWER = -126.0  # everything below it gives 0
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000
# 1.5 * 2**23: adding it puts the nearest integer in the last bits, subtracting it again gives that integer.


def power_of_two(e: Emitter, power: ir.Value) -> ir.Value:
    """2 to the power of float32 numbers of at most 0; NaN stays NaN."""
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


_QUICK_POWERS = (1.00000252, 0.693006621, 0.241427493, 0.0520374288, 0.0135206032)
# 2**x = sum(c * x**i) to 2.7e-6 for 0 <= x < 1 (least squares), hundreds of times less than bfloat16's rounding.
_FLOOR = 0x09
# Rounding mode of ``vreduceps`` before it subtracts: down, without exceptions.


def quick_power_of_two(e: Emitter, power: ir.Value) -> ir.Value:
    """2 to the power of 16 float32, with AVX-512; the power of -inf is 0, NaN stays NaN."""
    vector, every, rounding = power.type, ir.IntType(16)(-1), I32(4)
    rest = e.call("llvm.x86.avx512.mask.reduce.ps.512", vector, (power, I32(_FLOOR), power, every, rounding))
    value = vector([_QUICK_POWERS[-1]] * vector.count)
    for coefficient in _QUICK_POWERS[-2::-1]:
        value = e.fma(value, rest, vector([coefficient] * vector.count))
    # scalef rounds the exponent down itself.
    return e.call("llvm.x86.avx512.mask.scalef.ps.512", vector, (value, power, value, every, rounding))
