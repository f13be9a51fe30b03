"""LLVM building blocks for vectors, from which :mod:`baton.engine.cpu.vectors` and others assemble intrinsics."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
PTR = ir.PointerType()
LINE_BYTES = 64
LONGEST_STEP = 32
_SLOW_PAIRS = ("sapphirerapids", "emeraldrapids")
"""CPUs, by LLVM's names, on which pairs were measured to be slow; Zen 4 and Zen 5 are known to multiply them fast."""

Combine = Callable[[ir.Value, ir.Value], ir.Value]


class BFloat(ir.Type):
    """LLVM's bfloat type, for which llvmlite has no class."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


@cache
def features() -> frozenset[str]:
    """Instruction sets for which numba generates code: those in ``NUMBA_CPU_FEATURES``, else the host's."""
    named = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return frozenset(name[1:] for name in named.split(",") if name.startswith("+"))


def has_features(*names: str) -> bool:
    """Whether code may use all of these instruction sets, by LLVM's names."""
    return features().issuperset(names)


@cache
def lanes() -> int:
    """Number of float32 values in a vector register."""
    if "avx512f" in features():
        return 16
    return 8 if "avx2" in features() else 4


@cache
def _most_sums() -> int:
    """Registers available for sums; the rest holds the factors."""
    has_32 = lanes() == 16 or platform.machine() in ("aarch64", "arm64")
    return 24 if has_32 else 12


def parts_in_registers(count: int, sums_each: int) -> list[range]:
    """Divides ``range(count)`` into the fewest even parts whose sums, ``sums_each`` per number, stay in registers.

    Other sums are written to memory and read again at every step: with 16 instead of 8, AVX2 multiplies 34 instead of
    80 GFLOP/s (one core of a Zen 3).
    """
    num_parts = min(count, -(-count * sums_each // _most_sums()))
    while count % num_parts:
        num_parts += 1
    size = count // num_parts
    return [range(first, first + size) for first in range(0, count, size)]


def carry(
    e: Emitter,
    end: ir.Value,
    step: int,
    starts: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """Emits a loop over ``range(0, end, step)`` with sums in registers: ``body(place, sums)`` returns the next sums.

    Returns:
        The sums at the end; the builder is positioned after the loop.
    """
    builder, before = e.b, e.b.block
    head, inside, done = (builder.append_basic_block(name) for name in ("head", "inside", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    place = builder.phi(I64)
    sums = [builder.phi(start.type) for start in starts]
    place.add_incoming(I64(0), before)
    for total, start in zip(sums, starts, strict=True):
        total.add_incoming(start, before)
    builder.cbranch(builder.icmp_unsigned("<", place, end), inside, done)

    builder.position_at_end(inside)
    added = body(place, list(sums))
    place.add_incoming(builder.add(place, I64(step)), builder.block)
    for total, value in zip(sums, added, strict=True):
        total.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return list(sums)


def add_all(
    add: Callable[[ir.Value, Any, Any], ir.Value], totals: Sequence[ir.Value], xs: Sequence[Any], ys: Sequence[Any]
) -> list[ir.Value]:
    """``add(totals[i, j], xs[i], ys[j])`` for each ``i`` and ``j``.

    The order keeps the shorter side in registers and streams the longer one.
    """
    places = [(i, j) for i in range(len(xs)) for j in range(len(ys))]
    order = sorted(places, key=lambda place: place[1]) if len(xs) < len(ys) else places
    added = {(i, j): add(totals[i * len(ys) + j], xs[i], ys[j]) for i, j in order}
    return [added[place] for place in places]


def has_pairs() -> bool:
    """Whether an instruction multiplies pairs of bfloat16."""
    return "avx512bf16" in features() and lanes() == 16


@cache
def has_fast_pairs() -> bool:
    """Whether that instruction is faster than float32 products, see :class:`baton.engine.cpu.dot.Dot`.

    It is not on an Emerald Rapids: one core multiplies 84 GFLOP/s with it, and 160 in float32.
    """
    return has_pairs() and (config.CPU_NAME or llvmlite.binding.get_host_cpu_name()) not in _SLOW_PAIRS


def is_widened(kind: types.Type) -> bool:
    """Whether reused values of a kind, uint16 for bfloat16, are split into float32 before they are multiplied."""
    return kind == types.uint16 and not has_fast_pairs()


def numbers_at_once(*, half: bool) -> int:
    """Numbers along a row that are multiplied in one step, at most :data:`LONGEST_STEP`."""
    return 2 * lanes() if half and has_pairs() else lanes()


def _halving_order(count: int) -> list[int]:
    """``range(count)`` in an order that pairwise interleaving turns into the natural one."""
    if count == 1:
        return [0]
    even = _halving_order(-(-count // 2))
    return [2 * number + odd for odd in range(2) for number in even if 2 * number + odd < count]


class Emitter:
    """Shorthands over an LLVM builder."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def at(self, base: ir.Value, offset: ir.Value | int) -> ir.Value:
        """Pointer ``offset`` bytes after ``base``."""
        value = I64(offset) if isinstance(offset, int) else offset
        return self.b.gep(base, [value], source_etype=I8)

    def load(self, base: ir.Value, kind: ir.Type, offset: ir.Value | int = 0) -> ir.Value:
        return self.b.load(self.at(base, offset), typ=kind, align=1)

    def store(self, value: ir.Value, base: ir.Value, offset: ir.Value | int = 0) -> None:
        self.b.store(value, self.at(base, offset), align=4)

    def room_for(self, kind: ir.Type) -> ir.Value:
        """Address of zeros on the stack."""
        with self.b.goto_entry_block():
            room = self.b.alloca(kind)
        self.b.store(kind(None), room, align=1)
        return room

    def prefetch(self, place: ir.Value) -> None:
        """Prefetches the cache line at ``place``, which need not exist."""
        self.call("llvm.prefetch.p0", ir.VoidType(), (place, I32(0), I32(2), I32(1)))

    def call(self, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), list(arguments))

    def splat(self, value: ir.Value, count: int) -> ir.Value:
        vector = ir.VectorType(value.type, count)
        first = self.b.insert_element(vector(ir.Undefined), value, I32(0))
        return self.b.shuffle_vector(first, vector(ir.Undefined), ir.VectorType(I32, count)([0] * count))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, (a, b, c))

    def widen(self, bits: ir.Value) -> ir.Value:
        """bfloat16 as ``<n x i16>`` → float32."""
        count = bits.type.count
        wide = self.b.zext(bits, ir.VectorType(I32, count))
        return self.b.bitcast(self.b.shl(wide, ir.VectorType(I32, count)([16] * count)), ir.VectorType(F32, count))

    def widen_half(self, bits: ir.Value) -> ir.Value:
        """float16 as ``<n x i16>`` → float32."""
        count = bits.type.count
        ints, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)
        if "f16c" in features():
            return self.b.fpext(self.b.bitcast(bits, ir.VectorType(ir.HalfType(), count)), floats)
        # Elsewhere LLVM may call an undefined function. Bias, infinity and subnormals need a conversion.
        wide = self.b.zext(bits, ints)
        size = self.b.and_(wide, ints([0x7FFF] * count))
        shifted = self.b.shl(size, ints([13] * count))
        normal = self.b.add(shifted, ints([112 << 23] * count))
        # Converted as integers: in float32 these would be flushed to zero, see baton.engine.cpu.subnormals.
        small = self.b.bitcast(self.b.fmul(self.b.uitofp(size, floats), floats([2.0**-24] * count)), ints)
        is_small = self.b.icmp_unsigned("<", size, ints([0x0400] * count))
        is_finite = self.b.icmp_unsigned("<", size, ints([0x7C00] * count))
        finite = self.b.select(is_small, small, normal)
        size = self.b.select(is_finite, finite, self.b.or_(shifted, ints([0x7F800000] * count)))
        sign = self.b.shl(self.b.and_(wide, ints([0x8000] * count)), ints([16] * count))
        return self.b.bitcast(self.b.or_(size, sign), floats)

    def round(self, values: ir.Value) -> ir.Value:
        """float32 → bfloat16 as ``<n x i16>``, to the nearest, ties to even."""
        count = values.type.count
        ints = ir.VectorType(I32, count)
        bits = self.b.bitcast(values, ints)
        odd = self.b.and_(self.b.lshr(bits, ints([16] * count)), ints([1] * count))
        up = self.b.add(self.b.add(bits, ints([0x7FFF] * count)), odd)
        # Rounding up could carry the bits of a NaN into those of a number.
        is_number = self.b.fcmp_ordered("ord", values, values)
        kept = self.b.select(is_number, up, ints([0x7FC0 << 16] * count))
        return self.b.trunc(self.b.lshr(kept, ints([16] * count)), ir.VectorType(I16, count))

    def round_pair(self, low: ir.Value, high: ir.Value) -> ir.Value:
        """Two ``<16 x float>`` → ``<32 x bfloat>``, where the CPU has the instruction."""
        kind = ir.VectorType(BFloat(), 32)
        return self.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, (high, low))

    def as_pairs(self, words: ir.Value) -> ir.Value:
        """``<16 x i32>`` as ``<32 x bfloat>``."""
        return self.b.bitcast(words, ir.VectorType(BFloat(), 2 * words.type.count))

    def transpose(self, rows: Sequence[ir.Value]) -> list[ir.Value]:
        """Transposes a square matrix of vectors; their number, a power of two, equals that of their lanes."""
        count = len(rows)
        mask = ir.VectorType(I32, count)
        matrix = list(rows)
        width = 1
        while width < count:
            for i in range(count):
                if i & width:
                    continue
                # Swaps the upper right and the lower left of every square of twice this width.
                low = [count + (lane ^ width) if lane & width else lane for lane in range(count)]
                high = [count + lane if lane & width else lane | width for lane in range(count)]
                upper, lower = matrix[i], matrix[i | width]
                matrix[i] = self.b.shuffle_vector(upper, lower, mask(low))
                matrix[i | width] = self.b.shuffle_vector(upper, lower, mask(high))
            width *= 2
        return matrix

    def store_rows(
        self, sums: Sequence[ir.Value], num_rows: int, num_columns: int, out: ir.Value, stride: ir.Value
    ) -> None:
        """Stores the sums that :meth:`fold` packed, row by row of a tile."""
        width = sums[0].type.count
        for row in range(num_rows):
            target = self.at(out, self.b.mul(stride, I64(row)))
            first = row * num_columns
            size = min(width, num_columns)
            for column in range(0, num_columns, size):
                vector, lane = divmod(first + column, width)
                mask = ir.VectorType(I32, size)(list(range(lane, lane + size)))
                self.store(self.b.shuffle_vector(sums[vector], sums[vector], mask), target, column * 4)

    def fold(self, vectors: list[ir.Value], combine: Combine | None = None) -> list[ir.Value]:
        """Sums over the lanes of each vector, in the order of the vectors, packed into as few vectors as possible.

        Lane ``j`` is added to lane ``j + half``, then the halves again, alike for every vector.

        Args:
            combine: operation on two vectors instead of addition; it must be commutative.
        """
        combine = combine or self.b.fadd
        count = vectors[0].type.count
        mask, width = ir.VectorType(I32, count), count
        groups = [range(first, min(first + count, len(vectors))) for first in range(0, len(vectors), count)]
        order = [group[number] for group in groups for number in _halving_order(len(group))]
        vectors, owners = [vectors[number] for number in order], [[number] * count for number in order]
        while width > 1:
            half = width // 2
            is_low = [lane % width < half for lane in range(count)]
            # The first vector's low half and the second's high half stay in place, which needs no shuffle.
            kept = [lane + (0 if low else count) for lane, low in enumerate(is_low)]
            moved = [lane + (half if low else count - half) for lane, low in enumerate(is_low)]
            halved, halved_owners = [], []
            for i in range(0, len(vectors), 2):
                j = min(i + 1, len(vectors) - 1)
                halves = [self.b.shuffle_vector(vectors[i], vectors[j], mask(chosen)) for chosen in (kept, moved)]
                halved.append(combine(*halves))
                halved_owners.append([(owners[i] + owners[j])[lane] for lane in kept])
            vectors, owners, width = halved, halved_owners, half
        return [self._in_order(*pair) for pair in zip(vectors, owners, strict=True)]

    def _in_order(self, vector: ir.Value, owners: list[int]) -> ir.Value:
        """Selects one lane of each owner, ordered by owner; ``owners`` has a number for each lane of ``vector``."""
        order = [owners.index(number) for number in sorted(set(owners))]
        order += order[-1:] * (len(owners) - len(order))
        if order == list(range(len(owners))):
            return vector
        return self.b.shuffle_vector(vector, vector, ir.VectorType(I32, len(order))(order))
