"""Treats numbers too small for float32's normal form, below 1.2e-38, as zero within a forward.

The instruction for pairs of bfloat16 always does so, and a product must have the same bits without it. It also avoids
the slow handling of such numbers.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.cpu.emitter import I32, Emitter

_FLUSH_TO_ZERO = 1 << 15
_SUBNORMALS_ARE_ZERO = 1 << 6
# Bits of x86's control register, MXCSR.


@intrinsic
def ignore_subnormals(typing_context):
    """Makes the calling thread treat them as zero; returns the argument for :func:`restore_subnormals`. x86 only."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if not _is_x86():
            return I32(0)
        place = cgutils.alloca_once(builder, I32)
        e = Emitter(builder)
        e.call("llvm.x86.sse.stmxcsr", ir.VoidType(), (place,))
        before = builder.load(place, typ=I32)
        builder.store(builder.or_(before, I32(_FLUSH_TO_ZERO | _SUBNORMALS_ARE_ZERO)), place)
        e.call("llvm.x86.sse.ldmxcsr", ir.VoidType(), (place,))
        return before

    return types.int32(), codegen


@intrinsic
def restore_subnormals(typing_context, before):
    """Reverses :func:`ignore_subnormals`, which returned ``before``."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if _is_x86():
            place = cgutils.alloca_once(builder, I32)
            builder.store(arguments[0], place)
            Emitter(builder).call("llvm.x86.sse.ldmxcsr", ir.VoidType(), (place,))
        return context.get_dummy_value()

    return types.void(types.int32), codegen


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")
