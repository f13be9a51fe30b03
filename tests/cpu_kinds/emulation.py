"""Emulates AVX-512 and AMX: the fused decoder's instructions are composed from those that every x86 CPU has.

LLVM itself splits vectors that are too wide for a CPU. Explicit instructions go through ``Emitter.call``, which is
replaced here. The results equal those of the instructions, except for the approximate reciprocal, which has 14 bits in
both cases.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils

from baton.engine.cpu import emitter, tiles
from baton.engine.cpu.emitter import F32, I16, I32, I64, PTR, BFloat, Emitter
from tests.cpu_kinds.kinds import CpuKind
from tests.cpu_kinds.matrix_unit import define_symbols

_INTS, _FLOATS = ir.VectorType(I32, 16), ir.VectorType(F32, 16)
_PAIRS = ir.VectorType(BFloat(), 32)
_MOST_POWER = 254.0
Arguments = Sequence[ir.Value]


def emulate(kind: CpuKind, features: frozenset[str]) -> None:
    """Makes this process compile for another kind of CPU. Call this before anything is compiled."""
    # The digest separates code compiled here from code compiled on such a CPU or by other versions of this emulation.
    emulated = features | kind.needs | {f"emulated-{_digest()}"}
    emitter.features = lambda: emulated
    Emitter.call = _call  # type: ignore[method-assign]
    if kind.has_tiles:
        define_symbols()
        ask_for_tiles()
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: kind.has_pairs)


def ask_for_tiles() -> None:
    """Requests the matrix unit from a fake kernel, which grants it for the whole process."""

    class Willing:
        def __init__(self, *arguments: object, **options: object) -> None: ...

        def syscall(self, *numbers: int) -> int:
            return 0

    real = ctypes.CDLL
    ctypes.CDLL = Willing  # type: ignore[assignment,misc]
    try:
        if not tiles.has_tiles():
            raise RuntimeError("the emulated matrix unit is not found")
    finally:
        ctypes.CDLL = real  # type: ignore[misc]


def _digest() -> str:
    """A digest of the sources on which compiled code depends."""
    digest = hashlib.blake2b(digest_size=4)
    for name in ("emulation.py", "matrix_unit.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


_real_call = Emitter.call


def _call(self: Emitter, name: str, result: ir.Type, arguments: Arguments) -> ir.Value:
    instruction = name.removeprefix("llvm.x86.")
    if instruction in _VECTORS:
        return _VECTORS[instruction](self, *arguments)
    if instruction in _TILES:
        addresses = [self.b.ptrtoint(each, I64) if each.type == PTR else each for each in arguments]
        return _real_call(self, f"emulated.{instruction}", result, addresses)
    if name.startswith("llvm.masked.load."):
        return _masked_load(self, result, *arguments)
    if instruction != name and not instruction.startswith("sse"):
        raise NotImplementedError(f"{name} is not emulated; add it to {Path(__file__).name}")
    return _real_call(self, name, result, arguments)


_TILES = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd64", "tilestored64", "tdpbf16ps")


def _of(number: float) -> ir.Constant:
    return _FLOATS([number] * 16)


def _split(e: Emitter, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The second and the first number of each pair of bfloat16, in float32."""
    bits = e.b.bitcast(pairs, _INTS)
    second = e.b.and_(bits, _INTS([0xFFFF << 16] * 16))
    return e.b.bitcast(second, _FLOATS), e.b.bitcast(e.b.shl(bits, _INTS([16] * 16)), _FLOATS)


def _multiply_pairs(e: Emitter, total: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    for left, right in zip(_split(e, x), _split(e, w), strict=True):
        total = e.fma(left, right, total)
    return total


def _round_pairs(e: Emitter, high: ir.Value, low: ir.Value) -> ir.Value:
    halves = [e.round(_without_subnormals(e, part)) for part in (low, high)]
    together = e.b.shuffle_vector(*halves, ir.VectorType(I32, 32)(list(range(32))))
    return e.b.bitcast(together, _PAIRS)


def _without_subnormals(e: Emitter, values: ir.Value) -> ir.Value:
    bits = e.b.bitcast(values, _INTS)
    is_small = e.b.icmp_unsigned("==", e.b.and_(bits, _INTS([0x7F800000] * 16)), _INTS([0] * 16))
    sign = e.b.and_(bits, _INTS([0x80000000] * 16))
    return e.b.bitcast(e.b.select(is_small, sign, bits), _FLOATS)


def _larger(e: Emitter, first: ir.Value, second: ir.Value, rounding: ir.Value) -> ir.Value:
    return e.b.select(e.b.fcmp_ordered(">", first, second), first, second)


def _reciprocal(e: Emitter, value: ir.Value, otherwise: ir.Value, mask: ir.Value) -> ir.Value:
    bits = e.b.bitcast(e.b.fdiv(_of(1.0), value), _INTS)
    return e.b.bitcast(e.b.and_(bits, _INTS([0xFFFFFE00] * 16)), _FLOATS)


def _floor(e: Emitter, value: ir.Value) -> ir.Value:
    return _real_call(e, "llvm.floor.v16f32", _FLOATS, (value,))


def _reduce(
    e: Emitter, value: ir.Value, control: ir.Value, otherwise: ir.Value, mask: ir.Value, rounding: ir.Value
) -> ir.Value:
    """The fractional part above the next lower integer; 0 for infinity."""
    size = _real_call(e, "llvm.fabs.v16f32", _FLOATS, (value,))
    is_infinite = e.b.fcmp_ordered("==", size, _of(float("inf")))
    return e.b.select(is_infinite, _of(0.0), e.b.fsub(value, _floor(e, value)))


def _scale(
    e: Emitter, value: ir.Value, power: ir.Value, otherwise: ir.Value, mask: ir.Value, rounding: ir.Value
) -> ir.Value:
    """``value * 2**floor(power)`` in two steps, of which only the second may round."""
    capped = e.b.select(e.b.fcmp_ordered(">", power, _of(_MOST_POWER)), _of(_MOST_POWER), power)
    floored = _floor(e, e.b.select(e.b.fcmp_ordered(">", capped, _of(-_MOST_POWER)), capped, _of(-_MOST_POWER)))
    whole = e.b.fptosi(floored, _INTS)
    half = e.b.ashr(whole, _INTS([1] * 16))
    scaled = value
    for exponent in (half, e.b.sub(whole, half)):
        bits = e.b.shl(e.b.add(exponent, _INTS([127] * 16)), _INTS([23] * 16))
        scaled = e.b.fmul(scaled, e.b.bitcast(bits, _FLOATS))
    return e.b.select(e.b.fcmp_unordered("uno", power, power), power, scaled)


def _permute(e: Emitter, table: ir.Value, words: ir.Value) -> ir.Value:
    room, chosen = e.room_for(table.type), e.b.and_(words, words.type([31] * 32))
    e.store(table, room)
    result = words.type(ir.Undefined)
    for lane in range(32):
        place = e.b.zext(e.b.extract_element(chosen, I32(lane)), I64)
        result = e.b.insert_element(result, e.load(room, I16, e.b.mul(place, I64(2))), I32(lane))
    return result


def _masked_load(
    e: Emitter, result: ir.VectorType, source: ir.Value, alignment: ir.Value, mask: ir.Value, otherwise: ir.Value
) -> ir.Value:
    """Loads the first numbers of a vector, for each of which LLVM would emit a branch."""
    count, item = result.count, result.element.width // 8
    chosen = _real_call(e, f"llvm.ctpop.i{count}", ir.IntType(count), (e.b.bitcast(mask, ir.IntType(count)),))
    room = e.room_for(result)
    cgutils.raw_memcpy(e.b, room, source, e.b.zext(chosen, I64), item)
    return e.load(room, result)


_VECTORS: dict[str, Callable[..., Any]] = {
    "avx512bf16.dpbf16ps.512": _multiply_pairs,
    "avx512bf16.cvtne2ps2bf16.512": _round_pairs,
    "avx512.max.ps.512": _larger,
    "avx512.rcp14.ps.512": _reciprocal,
    "avx512.mask.reduce.ps.512": _reduce,
    "avx512.mask.scalef.ps.512": _scale,
    "avx512.permvar.hi.512": _permute,
}
