"""Powers of two of a vector, in the emitter's words."""

from __future__ import annotations

from llvmlite import ir

from engine.fused.emitter import I32, Emitter

LOG2E = 1.4426950408889634
# 2**x = sum(c * x**i), Taylor's series: to 1.2e-7 for |x| <= 1/2.
_POWERS = (1.0, 0.6931471806, 0.2402265070, 0.0555041087, 0.0096181291, 0.0013333558, 0.0001540353)
_LEAST_POWER = -126.0  # and everything below it is 0
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000
# 1.5 * 2**23: adding it leaves the nearest whole number in the last bits, subtracting it again that number.


def power_of_two(e: Emitter, power: ir.Value) -> ir.Value:
    """2 to the power of float32 that are 0 or less; NaN stays NaN."""
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
