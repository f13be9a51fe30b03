"""``silu(gate) * up`` of a row in vector code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.fused.emitter import F32, I64, PTR, Emitter, lanes
from engine.fused.powers import LOG2E, power_of_two
from engine.fused.vectors import is_half


@intrinsic
def gated_silu(typing_context, kind, gate, up, count, out):
    """``out = silu(gate) * up``, ``count`` numbers of them.

    Args:
        kind: a uint16 when ``out`` takes bfloat16, a float32 when it takes that.
        gate, up, out: addresses, the first two of float32; ``out`` may be ``gate`` where it takes float32.
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
                value = _gated(e, e.load(gates, vector, at), e.load(ups, vector, at))
                e.store(e.round(value) if half else value, target, builder.mul(place, I64(item)))
        return context.get_dummy_value()

    return signature, codegen


def _gated(e: Emitter, gate: ir.Value, up: ir.Value) -> ir.Value:
    """``gate / (1 + exp(-gate)) * up``; the exponential is taken of what is not above 0, so that it stays finite."""
    b, vector = e.b, gate.type
    one = vector([1.0] * vector.count)
    size = e.call(f"llvm.fabs.v{vector.count}f32", vector, (gate,))
    small = power_of_two(e, b.fmul(size, vector([-LOG2E] * vector.count)))
    numerator = b.select(b.fcmp_ordered(">=", gate, vector([0.0] * vector.count)), gate, b.fmul(gate, small))
    return b.fmul(b.fdiv(numerator, b.fadd(one, small)), up)
