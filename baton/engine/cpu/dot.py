"""Products of two rows of numbers, one step at a time."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from baton.engine.cpu.emitter import (
    F32,
    I8,
    I16,
    I32,
    I64,
    BFloat,
    Emitter,
    has_fast_pairs,
    has_features,
    has_pairs,
    lanes,
    numbers_at_once,
)

Operand = list[ir.Value]
"""A step of values as they are multiplied: one vector, or the two into which pairs were split."""


def _has_masks(item: int) -> bool:
    """Whether an instruction loads some of a vector's numbers of ``item`` bytes without touching the others' memory.

    Otherwise LLVM emits a branch for each number, which adds half a minute to the compilation of a program this large.
    """
    return has_features("avx512bw", "avx512vl") or (item == 4 and has_features("avx2"))


class Dot:
    """Multiplies and sums values of one type along a row.

    A pair of bfloat16 is multiplied by one instruction, if there is one, or *split* into two float32, the pair's second
    number and its first, for two fused multiply-adds in this order. Where subnormal numbers count as zero, this equals
    the instruction bit for bit (a product of two bfloat16 is exact in float32).

    Args:
        half: bfloat16, else float32.
        whole: weights are int8; they become operands in registers, which is exact, or split ones where these are
            faster. The sums are the same as with operands in memory.
        reused: every loaded value is multiplied several times, so that splitting pairs may pay.
        widened: ``x`` is in memory as :meth:`store_widened` writes it, in float32, split where there are pairs.
    """

    def __init__(
        self, emitter: Emitter, *, half: bool, whole: bool = False, reused: bool = False, widened: bool = False
    ) -> None:
        self.e = emitter
        self.half = half
        self.whole = whole
        self.paired = half and has_pairs()
        self.split = self.paired and (widened or ((reused or whole) and not has_fast_pairs()))
        self.widened = widened
        self.step = numbers_at_once(half=half)
        self.item = 2 if half else 4
        self.weight_item = 1 if whole else self.item
        self.raw = ir.VectorType(I16 if half else I32, self.step)

    def load(self, base: ir.Value, place: ir.Value) -> Operand:
        """Loads a step of values, from number ``place`` of a row on."""
        if self.widened:
            vector, bytes_of = ir.VectorType(F32, lanes()), 4 * lanes()
            row = self.e.at(base, self._bytes(place, 4))
            return [self.e.load(row, vector, i * bytes_of) for i in range(self.step // lanes())]
        return self.operand(self.e.load(base, self.raw, self._bytes(place, self.item)))

    def load_part(self, base: ir.Value, place: ir.Value, count: ir.Value) -> Operand:
        """Loads the first ``count`` numbers of a step; the rest is zeros, which a widened row contains."""
        if self.widened:
            return self.load(base, place)
        return self.operand(self._part(self.raw, self.item, base, place, count))

    def load_weights(self, base: ir.Value, place: ir.Value) -> Operand:
        """Like :meth:`load`, for weights."""
        raw = self.e.load(base, self._raw_weights(), self._bytes(place, self.weight_item))
        return self._weights(raw)

    def load_weights_part(self, base: ir.Value, place: ir.Value, count: ir.Value) -> Operand:
        """Like :meth:`load_part`, for weights."""
        return self._weights(self._part(self._raw_weights(), self.weight_item, base, place, count))

    def store_widened(self, values: Operand, out: ir.Value, place: ir.Value) -> None:
        """Stores a step of values for a product with a widened ``x``."""
        row = self.e.at(out, self._bytes(place, 4))
        for i, value in enumerate(values):
            self.e.store(value, row, 4 * lanes() * i)

    def weight_line(self, place: ir.Value) -> ir.Value:
        """Bytes from the start of a row of weights to number ``place``."""
        return self._bytes(place, self.weight_item)

    def operand(self, raw: ir.Value) -> Operand:
        """Converts values from their form in memory to the form in which they are multiplied."""
        if self.split:
            ints, floats = ir.VectorType(I32, lanes()), ir.VectorType(F32, lanes())
            bits = self.e.b.bitcast(raw, ints)
            second = self.e.b.and_(bits, ints([0xFFFF << 16] * lanes()))
            return [self.e.b.bitcast(part, floats) for part in (second, self.e.b.shl(bits, ints([16] * lanes())))]
        if self.paired:
            return [self.e.b.bitcast(raw, ir.VectorType(BFloat(), self.step))]
        if self.half:
            return [self.e.widen(raw)]
        return [self.e.b.bitcast(raw, ir.VectorType(F32, self.step))]

    def add(self, total: ir.Value, x: Operand, w: Operand) -> ir.Value:
        if self.paired and not self.split:
            return self.e.call("llvm.x86.avx512bf16.dpbf16ps.512", total.type, (total, *x, *w))
        for x_part, w_part in zip(x, w, strict=True):
            total = self.e.fma(x_part, w_part, total)
        return total

    def _bytes(self, place: ir.Value, item: int) -> ir.Value:
        return self.e.b.mul(place, I64(item))

    def _part(self, raw: ir.VectorType, item: int, base: ir.Value, place: ir.Value, count: ir.Value) -> ir.Value:
        source = self.e.at(base, self._bytes(place, item))
        if _has_masks(item):
            numbers = ir.VectorType(I64, self.step)(list(range(self.step)))
            mask = self.e.b.icmp_unsigned("<", numbers, self.e.splat(count, self.step))
            name, zeros = f"llvm.masked.load.v{self.step}i{8 * item}.p0", raw([0] * self.step)
            return self.e.call(name, raw, (source, I32(1), mask, zeros))
        buffer = self.e.room_for(raw)
        cgutils.raw_memcpy(self.e.b, buffer, source, count, item)
        return self.e.load(buffer, raw)

    def _raw_weights(self) -> ir.VectorType:
        return ir.VectorType(I8, self.step) if self.whole else self.raw

    def _weights(self, raw: ir.Value) -> Operand:
        """Converts int8 to operands: seven bits and a sign fit into a bfloat16."""
        if not self.whole:
            return self.operand(raw)
        b, floats, ints = self.e.b, ir.VectorType(F32, lanes()), ir.VectorType(I32, lanes())
        if self.split:
            pairs = b.zext(b.bitcast(raw, ir.VectorType(I16, lanes())), ints)
            at_top = [b.shl(pairs, ints([bits] * lanes())) for bits in (16, 24)]
            return [b.sitofp(b.ashr(part, ints([24] * lanes())), floats) for part in at_top]
        if not self.paired:
            return [b.sitofp(raw, floats)]
        halves = [ir.VectorType(I32, lanes())(list(range(first, first + lanes()))) for first in (0, lanes())]
        return [self.e.round_pair(*(b.sitofp(b.shuffle_vector(raw, raw, half), floats) for half in halves))]
