"""``silu(gate) * up`` of a row in vector code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.cpu.emitter import F32, I16, I32, I64, PTR, Emitter, lanes
from baton.engine.cpu.powers import LOG2E, power_of_two, quick_power_of_two
from baton.engine.cpu.tiles import PAIRS_BYTES, TILE, has_tiles
from baton.engine.cpu.vectors import is_half

_LEAST_GATE = -87.0
"""Results below it are zero, too, and its power of two would not be finite."""


@intrinsic
def gated_silu(typing_context, kind, gate, up, count, out):
    """``out = silu(gate) * up`` for ``count`` numbers.

    Args:
        kind: a uint16 when ``out`` is bfloat16, a float32 when it is float32.
        gate, up, out: addresses, the first two of float32; ``out`` may be ``gate`` if it is float32.
    """
    half = is_half(kind)
    signature = types.void(kind, *[types.int64] * 4)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e, width, item = Emitter(builder), lanes(), 2 if half else 4
        gates, ups, target = (builder.inttoptr(arguments[i], PTR) for i in (1, 2, 4))
        rest = builder.and_(arguments[3], I64(width - 1))
        end = builder.sub(arguments[3], rest)
        for first, last, size in ((I64(0), end, width), (end, arguments[3], 1)):
            vector = ir.VectorType(F32, size)
            with cgutils.for_range_slice(builder, first, last, I64(size)) as (place, _):
                at = builder.mul(place, I64(4))
                compute = _gated_quickly if half and has_tiles() and size == TILE else _gated
                value = compute(e, e.load(gates, vector, at), e.load(ups, vector, at))
                e.store(e.round(value) if half else value, target, builder.mul(place, I64(item)))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def gate_columns(typing_context, gate, up, out):
    """``silu(gate) * up`` of two products ``[16 columns, 16 tokens]`` → packed tokens, ``[8, 16, 2]`` bfloat16.

    The bits equal those of :func:`gated_silu`.

    Args:
        gate, up, out: addresses, the first two of float32.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if not has_tiles():
            return context.get_dummy_value()
        e, vector = Emitter(builder), ir.VectorType(F32, TILE)
        gates, ups, target = (builder.inttoptr(address, PTR) for address in arguments)
        with cgutils.for_range_slice(builder, I64(0), I64(TILE // 2), I64(1)) as (pair, _):
            at = builder.mul(pair, I64(2 * 4 * TILE))
            columns = [
                _gated_quickly(e, *(e.load(root, vector, builder.add(at, I64(4 * TILE * i))) for root in (gates, ups)))
                for i in range(2)
            ]
            halves = builder.bitcast(e.round_pair(*columns), ir.VectorType(I16, 2 * TILE))
            order = [token + TILE * column for token in range(TILE) for column in range(2)]
            mixed = builder.shuffle_vector(halves, halves, ir.VectorType(I32, 2 * TILE)(order))
            e.store(mixed, target, builder.mul(pair, I64(PAIRS_BYTES)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


def _gated(e: Emitter, gate: ir.Value, up: ir.Value) -> ir.Value:
    """``gate / (1 + exp(-gate)) * up``; the exponential's argument is at most 0, so that it stays finite."""
    b, vector = e.b, gate.type
    one = vector([1.0] * vector.count)
    size = e.call(f"llvm.fabs.v{vector.count}f32", vector, (gate,))
    small = power_of_two(e, b.fmul(size, vector([-LOG2E] * vector.count)))
    numerator = b.select(b.fcmp_ordered(">=", gate, vector([0.0] * vector.count)), gate, b.fmul(gate, small))
    return b.fmul(b.fdiv(numerator, b.fadd(one, small)), up)


def _gated_quickly(e: Emitter, gate: ir.Value, up: ir.Value) -> ir.Value:
    """Like :func:`_gated`, for 16 float32 with AVX-512, as precise as bfloat16 needs."""
    b, vector = e.b, gate.type
    # If one of the two operands is NaN, this returns the second.
    gate = e.call("llvm.x86.avx512.max.ps.512", vector, (vector([_LEAST_GATE] * TILE), gate, I32(4)))
    power = quick_power_of_two(e, b.fmul(gate, vector([-LOG2E] * TILE)))
    divisor = b.fadd(power, vector([1.0] * TILE))
    guess = e.call("llvm.x86.avx512.rcp14.ps.512", vector, (divisor, divisor, ir.IntType(16)(-1)))
    # Newton's step: from 14 bits to 28.
    rest = e.fma(b.fneg(divisor), guess, vector([2.0] * TILE))
    return b.fmul(b.fmul(gate, b.fmul(guess, rest)), up)
