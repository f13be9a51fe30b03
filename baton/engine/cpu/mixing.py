"""Sums of weighted values.

Where a fast instruction multiplies pairs of bfloat16, weights are rounded to bfloat16 and two keys are processed at
once, which halves the work. Pairs always begin at the first key of a chunk, and a last key without a neighbour gets one
of weight zero, so a row's bits depend neither on the other rows nor on keys that it cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from baton.engine.cpu.arithmetic import floats, from_operand, item_size, numbers, operands
from baton.engine.cpu.dot import Dot
from baton.engine.cpu.emitter import (
    F32,
    I16,
    I32,
    I64,
    LINE_BYTES,
    PTR,
    Emitter,
    add_all,
    carry,
    has_fast_pairs,
    lanes,
    parts_in_registers,
)
from baton.engine.cpu.key_slots import KEY_CHUNK
from baton.engine.cpu.vectors import is_half

_WEIGHT_ROW_BYTES = 4 * KEY_CHUNK


def has_rounded_weights(kind: types.Type) -> bool:
    """Whether weights for values of that kind are bfloat16, else float32; see ``is_half``."""
    return is_half(kind) and has_fast_pairs()


def weight_bytes(kind: Any) -> int:
    """Bytes of a weight for values of that kind."""
    raise NotImplementedError  # for compiled code only


@overload(weight_bytes)
def _weight_bytes_of(kind):
    size = 2 if has_rounded_weights(kind) else 4
    return lambda kind: size


@njit(error_model="numpy")
def mix(kind, weights, num_rows, values, ldv, slots, num_keys, ahead, dim, lanes, out):
    """``out[i] += sum(weights[i, j] * values[slots[j]])``

    Args:
        weights: address of rows of ``KEY_CHUNK`` weights, as many bytes apart as float32 rows, in the format of
            :func:`has_rounded_weights`; an odd number of weights is followed by a 0.
        values: address of the operands of slot 0; ``ldv``: bytes from slot to slot.
        slots: address of int64 ``[num_keys]``.
        ahead: address from which as many bytes as are read are prefetched, except for those of numbers that do not fill
            four vectors; 0 prefetches nothing.
        lanes: lanes of a vector, see :func:`baton.engine.cpu.emitter.lanes`.
        out: address of float32 ``[num_rows, dim]``.
    """
    ldw, ldo, item = _WEIGHT_ROW_BYTES, 4 * dim, item_size(kind)
    for i in range(0, num_rows, 4):
        p, row, left = weights + i * ldw, out + i * ldo, min(4, num_rows - i)
        d, ask = 0, ahead if i == 0 else 0
        while d + 4 * lanes <= dim:
            v, o = values + d * item, row + 4 * d
            if ask:
                _mix_asking(kind, left, p, v, ldv, slots, num_keys, ask, o, ldo)
                ask += 4 * lanes * item * num_keys
            else:
                _mix_rows(kind, left, p, v, ldv, slots, num_keys, 0, o, ldo)
            d += 4 * lanes
        while d + lanes <= dim:
            for r in range(left):
                v, o = values + d * item, row + r * ldo + 4 * d
                mix_tile(kind, 1, 1, 0, p + r * ldw, ldw, v, ldv, slots, num_keys, 0, o, ldo)
            d += lanes
        if d < dim:
            for r in range(left):
                _mix_rest(kind, p + r * ldw, values + d * item, ldv, slots, num_keys, dim - d, row + r * ldo + 4 * d)


@njit(error_model="numpy")
def _mix_rest(kind, weights, values, ldv, slots, num_keys, dim, out):
    total, slot = floats(out, dim), numbers(slots, num_keys)
    for j in range(num_keys):
        weight, row = _weight(kind, weights, j), operands(kind, values + slot[j] * ldv, dim)
        for d in range(dim):
            total[d] += weight * from_operand(kind, row[d])


@intrinsic
def _weight(typing_context, kind, weights, number):
    """One weight of a row, as float32."""
    rounded = has_rounded_weights(kind)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        row, number = builder.inttoptr(arguments[1], PTR), arguments[2]
        if not rounded:
            return e.load(row, F32, builder.mul(number, I64(4)))
        bits = builder.zext(e.load(row, I16, builder.mul(number, I64(2))), I32)
        return builder.bitcast(builder.shl(bits, I32(16)), F32)

    return types.float32(kind, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def mix_tile(typing_context, kind, rows, vectors, asked, p, ldp, v, ldv, index, count, ask, out, ldo):
    """``out[i, :] += sum(p[i, j] * v[index[j], :] for j < count)``, ``vectors`` registers wide.

    Args:
        kind: see :func:`baton.engine.cpu.vectors.dot_tile`.
        rows, vectors: literals.
        asked: 1 prefetches as many bytes as are read, from the address ``ask`` on.
        p: address of weights, see :func:`mix`, with a 0 after an odd number of them.
        v, index, out: addresses; ``ldp``, ``ldv``, ``ldo``: bytes from row to row.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    mixer = _PairMixer if has_rounded_weights(kind) else _Mixer
    signature = types.void(kind, rows, vectors, asked, *[types.int64] * 9)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        p_base, p_stride, v_base, v_stride, index_base, length, ask, out_base, out_stride = arguments[4:]
        e = Emitter(builder)
        p_root, v_root, index_root, out_root = (
            builder.inttoptr(address, PTR) for address in (p_base, v_base, index_base, out_base)
        )
        p_rows = [e.at(p_root, builder.mul(p_stride, I64(i))) for i in range(num_rows)]
        out_rows = [e.at(out_root, builder.mul(out_stride, I64(i))) for i in range(num_rows)]
        for part in parts_in_registers(num_vectors, num_rows):
            item = 2 if is_half(kind) else 4
            start, whole = part.start * lanes() * item, num_vectors * lanes() * item
            first = e.at(v_root, start)
            following = (builder.add(ask, I64(start)), whole) if asked.literal_value else None
            keys = mixer(e, is_half(kind), (first, v_stride), following, index_root, length, len(part))
            _add_keys(e, keys, p_rows, [e.at(row, 4 * lanes() * j) for row in out_rows for j in part])
        return context.get_dummy_value()

    return signature, codegen


def _mixer_of_rows(asked: int) -> Any:
    """Returns the function for four vectors of up to four rows: ``asked`` must be a literal for :func:`mix_tile`."""

    @njit(error_model="numpy")
    def mix_rows(kind, num_rows, p, v, ldv, slots, num_keys, ask, out, ldo):
        ldw = _WEIGHT_ROW_BYTES
        if num_rows == 4:
            mix_tile(kind, 4, 4, asked, p, ldw, v, ldv, slots, num_keys, ask, out, ldo)
        elif num_rows == 3:
            mix_tile(kind, 3, 4, asked, p, ldw, v, ldv, slots, num_keys, ask, out, ldo)
        elif num_rows == 2:
            mix_tile(kind, 2, 4, asked, p, ldw, v, ldv, slots, num_keys, ask, out, ldo)
        else:
            mix_tile(kind, 1, 4, asked, p, ldw, v, ldv, slots, num_keys, ask, out, ldo)

    return mix_rows


_mix_rows, _mix_asking = _mixer_of_rows(0), _mixer_of_rows(1)


def _add_keys(e: Emitter, keys: _Mixer, p_rows: list[ir.Value], places: list[ir.Value]) -> None:
    """Adds every key's values, weighted for each row, to the sums at ``places``, row by row."""
    starts = [e.load(place, ir.VectorType(F32, lanes())) for place in places]

    def body(number: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        values = keys.values(number)
        return add_all(keys.add, totals, [keys.weight(p_row, number) for p_row in p_rows], values)

    for total, place in zip(carry(e, keys.length, keys.at_once, starts, body), places, strict=True):
        e.store(total, place)


class _Mixer:
    """Processes one key at a time, in float32.

    Args:
        values: address of slot 0, and bytes from slot to slot.
        asked: address to prefetch at the first key, and bytes from there to the next key's; ``None`` prefetches
            nothing.
        index: address of the keys' slots; ``length``: their number.
        num_vectors: registers that a key's values fill.
    """

    at_once = 1

    def __init__(
        self,
        e: Emitter,
        half: bool,
        values: tuple[ir.Value, ir.Value],
        asked: tuple[ir.Value, int] | None,
        index: ir.Value,
        length: ir.Value,
        num_vectors: int,
    ) -> None:
        self.e, self.half, self.index, self.length, self.num_vectors = e, half, index, length, num_vectors
        self._root, self._stride = values
        self._asked = asked

    def row(self, number: ir.Value) -> ir.Value:
        """Address of a key's values."""
        slot = self.e.load(self.index, I64, self.e.b.mul(number, I64(8)))
        return self.e.at(self._root, self.e.b.mul(self._stride, slot))

    def values(self, number: ir.Value) -> list[ir.Value]:
        """Vectors of the values of key ``number``, as they are multiplied."""
        row, item = self.row(number), 2 if self.half else 4
        raw = ir.VectorType(I16 if self.half else F32, lanes())
        loaded = [self.e.load(row, raw, item * lanes() * j) for j in range(self.num_vectors)]
        self.ask(number)
        return [self.e.widen(value) for value in loaded] if self.half else loaded

    def ask(self, number: ir.Value) -> None:
        """Prefetches for key ``number`` as many bytes as are read of it."""
        if self._asked is None:
            return
        b, (first, stride) = self.e.b, self._asked
        place = b.inttoptr(b.add(first, b.mul(number, I64(stride))), PTR)
        for line in range(0, self.num_vectors * lanes() * (2 if self.half else 4), LINE_BYTES):
            self.e.prefetch(self.e.at(place, line))

    def weight(self, row: ir.Value, number: ir.Value) -> ir.Value:
        """A row's weight of key ``number``, in all lanes."""
        return self.e.splat(self.e.load(row, F32, self.e.b.mul(number, I64(4))), lanes())

    def add(self, total: ir.Value, weight: ir.Value, value: ir.Value) -> ir.Value:
        return self.e.fma(weight, value, total)


class _PairMixer(_Mixer):
    """Processes two keys at a time, as pairs of bfloat16."""

    at_once = 2

    def values(self, number: ir.Value) -> list[ir.Value]:
        b, width = self.e.b, lanes()
        following = b.add(number, I64(1))
        # The neighbour of the last key has weight zero, but its values must be finite.
        other = b.select(b.icmp_unsigned("<", following, self.length), following, number)
        rows, mixed = (self.row(number), self.row(other)), []
        for key in (number, following):
            self.ask(key)
        at_once = 2 if self.num_vectors % 2 == 0 else 1
        raw = ir.VectorType(I16, width * at_once)
        for first in range(0, self.num_vectors, at_once):
            even, odd = (self.e.load(row, raw, 2 * width * first) for row in rows)
            for half in range(at_once):
                order = [lane + odd_key * raw.count for lane in _lanes_of(half) for odd_key in range(2)]
                interleaved = b.shuffle_vector(even, odd, ir.VectorType(I32, 2 * width)(order))
                mixed.append(self.e.as_pairs(b.bitcast(interleaved, ir.VectorType(I32, width))))
        return mixed

    def weight(self, row: ir.Value, number: ir.Value) -> ir.Value:
        return self.e.as_pairs(self.e.splat(self.e.load(row, I32, self.e.b.mul(number, I64(2))), lanes()))

    def add(self, total: ir.Value, weight: ir.Value, value: ir.Value) -> ir.Value:
        return Dot(self.e, half=True).add(total, [weight], [value])


def _lanes_of(half: int) -> range:
    return range(lanes() * half, lanes() * (half + 1))
