"""Intrinsics for operations that numba cannot express: vector products, atomics, and memory by address.

Weights and keys are read in place, row by row along the dimension that is summed over: nothing is repacked. Every sum
adds its terms in the same order whatever else is computed beside it, so a token's result does not depend on the other
tokens of its step.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.cpu.dot import Dot
from baton.engine.cpu.emitter import F32, I32, I64, LINE_BYTES, PTR, Emitter, add_all, carry, lanes, parts_in_registers


def is_half(kind: types.Type) -> bool:
    """Whether operands are bfloat16: an intrinsic receives a uint16 for bfloat16, else a float32."""
    return bool(kind == types.uint16)


@intrinsic(prefer_literal=True)
def dot_tile(typing_context, x_kind, kind, rows, columns, indexed, asked, x, ldx, w, ldw, index, ask, k, out, ldo):
    """``out[i, j] = sum(x[i, :k] * w[j, :k])`` for ``rows * columns`` sums, a multiple of the vector's lanes.

    Args:
        x_kind: ``kind``, or a float32 for rows of ``x`` from :func:`widen_steps`.
        kind: a uint16 when the operands are bfloat16, a float32 when they are float32.
        indexed: 1 means that row ``j`` of ``w`` is number ``index[j]`` (int64) instead of ``j``.
        asked: number of rows of ``w`` to prefetch, from the one at ``ask`` on, which need not exist.
        x, w, index, ask, out: addresses; ``ldx``, ``ldw``, ``ldo``: bytes from row to row.
    """
    num_rows, num_columns = rows.literal_value, columns.literal_value
    by_index, num_asked = bool(indexed.literal_value), int(asked.literal_value)
    half, reused = is_half(kind), min(num_rows, num_columns) > 2
    widened = half and not is_half(x_kind)
    signature = types.void(x_kind, kind, rows, columns, indexed, asked, *[types.int64] * 9)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        x, ldx, w, ldw, index, ask, k, out, ldo = arguments[6:]
        e = Emitter(builder)
        if by_index:
            index_root = builder.inttoptr(index, PTR)
            numbers = [e.load(index_root, I64, 8 * j) for j in range(num_columns)]
        else:
            numbers = [I64(j) for j in range(num_columns)]
        dot = Dot(e, half=half, reused=reused, widened=widened)
        _emit_tile(e, dot, num_rows, (x, ldx), (w, ldw), numbers, (ask, num_asked), k, (out, ldo))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def dot_tile_int8(typing_context, kind, columns, asked, x, w, ldw, ask, k, out):
    """Like :func:`dot_tile`, for one row of ``x`` and int8 rows; equal bit for bit to the same integers as operands."""
    num_columns, num_asked = columns.literal_value, int(asked.literal_value)
    half = is_half(kind)
    signature = types.void(kind, columns, asked, *[types.int64] * 6)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        x, w, ldw, ask, k, out = arguments[3:]
        e = Emitter(builder)
        numbers = [I64(j) for j in range(num_columns)]
        dot = Dot(e, half=half, whole=True)
        _emit_tile(e, dot, 1, (x, I64(0)), (w, ldw), numbers, (ask, num_asked), k, (out, I64(0)))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def dot_tile_part(typing_context, kind, rows, columns, asked, part, x, ldx, w, ldw, ask, k, sums, out, ldo):
    """Like :func:`dot_tile`, along a part of the rows, with the same final bits as along whole ones.

    Args:
        part: -1 for the first part, 0 for one between, 1 for the last.
        k: length of the part; a multiple of 64 except for the last one.
        sums: address of ``rows * columns`` vectors for the partial sums between parts.
        out: written only by the last part.
    """
    num_rows, num_columns, num_asked = rows.literal_value, columns.literal_value, int(asked.literal_value)
    is_first, is_last = part.literal_value < 0, part.literal_value > 0
    half = is_half(kind)
    signature = types.void(kind, rows, columns, asked, part, *[types.int64] * 9)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        x, ldx, w, ldw, ask, k, sums, out, ldo = arguments[5:]
        e = Emitter(builder)
        numbers, dot = [I64(j) for j in range(num_columns)], Dot(e, half=half)
        before, after = None if is_first else sums, None if is_last else sums
        _emit_tile(e, dot, num_rows, (x, ldx), (w, ldw), numbers, (ask, num_asked), k, (out, ldo), before, after)
        return context.get_dummy_value()

    return signature, codegen


def _emit_tile(
    e: Emitter,
    dot: Dot,
    num_rows: int,
    x: tuple[ir.Value, ir.Value],
    w: tuple[ir.Value, ir.Value],
    numbers: Sequence[ir.Value],
    ask: tuple[ir.Value, int],
    length: ir.Value,
    out: tuple[ir.Value, ir.Value],
    before: ir.Value | None = None,
    after: ir.Value | None = None,
) -> None:
    """Emits the tile of the rows of ``x`` and the rows ``numbers`` of ``w``; a matrix is an address and a stride.

    Args:
        ask: address of the first row to prefetch, and the number of rows.
        before: address of the earlier parts' partial sums; ``None`` without any.
        after: address for the partial sums, instead of ``out``; ``None`` when they are complete.
    """
    x_root, w_root, out_root = (e.b.inttoptr(address, PTR) for address, _ in (x, w, out))
    vector = ir.VectorType(F32, lanes())
    x_rows = [e.at(x_root, e.b.mul(x[1], I64(i))) for i in range(num_rows)]
    w_rows = [e.at(w_root, e.b.mul(w[1], number)) for number in numbers]
    passes = parts_in_registers(len(numbers), num_rows)
    for number, columns in enumerate(passes):
        count, place = num_rows * len(columns), 4 * lanes() * num_rows * columns.start
        starts = [vector([0.0] * lanes())] * count
        if before is not None:
            starts = [e.load(e.b.inttoptr(before, PTR), vector, place + 4 * lanes() * i) for i in range(count)]
        rows = w_rows[columns.start : columns.stop]
        asked = range(ask[1])[number :: len(passes)]
        first = e.b.add(ask[0], e.b.mul(w[1], I64(number)))
        stride = e.b.mul(w[1], I64(len(passes)))
        totals = _loop_of_steps(e, dot, x_rows, rows, length, starts, (first, stride, len(asked)))
        if after is None:
            e.store_rows(e.fold(totals), num_rows, len(columns), e.at(out_root, 4 * columns.start), out[1])
            continue
        for i, total in enumerate(totals):
            e.store(total, e.b.inttoptr(after, PTR), place + 4 * lanes() * i)


def _loop_of_steps(
    e: Emitter,
    dot: Dot,
    x_rows: list[ir.Value],
    w_rows: list[ir.Value],
    length: ir.Value,
    starts: Sequence[ir.Value],
    asked: tuple[ir.Value, ir.Value, int],
) -> list[ir.Value]:
    """Emits the loop over all whole steps and the rest; returns one vector of partial sums for each pair of rows.

    Args:
        starts: initial values of the sums.
        asked: address of the first row to prefetch, bytes from one to the next, and their number.
    """
    builder, vector = e.b, starts[0].type
    rest = builder.and_(length, I64(dot.step - 1))
    end = builder.sub(length, rest)

    def body(place: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        weights = [dot.load_weights(row, place) for row in w_rows]
        added = add_all(dot.add, sums, [dot.load(row, place) for row in x_rows], weights)
        _ask(e, dot, place, *asked)
        return added

    totals = carry(e, end, dot.step, starts, body)
    after, part, done = builder.block, *(builder.append_basic_block(name) for name in ("part", "sums"))
    builder.cbranch(builder.icmp_unsigned("!=", rest, I64(0)), part, done)

    builder.position_at_end(part)
    x_parts = [dot.load_part(row, end, rest) for row in x_rows]
    w_parts = [dot.load_weights_part(row, end, rest) for row in w_rows]
    finished = add_all(dot.add, totals, x_parts, w_parts)
    last = builder.block
    builder.branch(done)

    builder.position_at_end(done)
    results = []
    for total, value in zip(totals, finished, strict=True):
        result = builder.phi(vector)
        result.add_incoming(total, after)
        result.add_incoming(value, last)
        results.append(result)
    return results


def _ask(e: Emitter, dot: Dot, place: ir.Value, first: ir.Value, stride: ir.Value, num_rows: int) -> None:
    """Prefetches the rows at ``place``; where a line covers several steps, each step prefetches some of the rows."""
    if num_rows == 0:
        return
    together = min(LINE_BYTES // (dot.step * dot.weight_item), num_rows)
    offset = e.b.add(first, dot.weight_line(place))
    if together > 1:
        turn = e.b.urem(e.b.udiv(place, I64(dot.step)), I64(together))
        offset = e.b.add(offset, e.b.mul(stride, turn))
    for row in range(0, num_rows, together):
        ahead = e.b.inttoptr(e.b.add(offset, e.b.mul(stride, I64(row))), PTR)
        e.prefetch(ahead)


@intrinsic(prefer_literal=True)
def widen_steps(typing_context, kind, x, k, out):
    """Converts a row of operands to the float32 ``x`` that tiles take for bfloat16: whole steps, padded with zeros.

    Args:
        kind: see :func:`dot_tile`.
        x, out: addresses; ``k``: numbers of the row.
    """
    half = is_half(kind)
    signature = types.void(kind, *[types.int64] * 3)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        e = Emitter(builder)
        source, dot = builder.inttoptr(arguments[1], PTR), Dot(e, half=half, reused=True)
        target, length = builder.inttoptr(arguments[3], PTR), arguments[2]
        rest = builder.and_(length, I64(dot.step - 1))
        end = builder.sub(length, rest)
        with cgutils.for_range_slice(builder, I64(0), end, I64(dot.step)) as (place, _):
            dot.store_widened(dot.load(source, place), target, place)
        with builder.if_then(builder.icmp_unsigned("!=", rest, I64(0))):
            dot.store_widened(dot.load_part(source, end, rest), target, end)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def pointer_to(typing_context, kind, address):
    """A typed pointer to ``address``; ``kind`` is any value of the type pointed to."""
    signature = types.CPointer(kind)(kind, types.int64)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.inttoptr(arguments[1], context.get_value_type(signature.return_type))

    return signature, codegen


@intrinsic
def float_of_bits(typing_context, bits):
    """The float32 with this int32's bits."""
    return types.float32(types.int32), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], F32)


@intrinsic
def bits_of_float(typing_context, value):
    """The bits of a float32, as an int32."""
    return types.int32(types.float32), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], I32)


@intrinsic
def prefetch(typing_context, address):
    """Prefetches the cache line at an address, which need not exist."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        pointer = builder.inttoptr(arguments[0], PTR)
        Emitter(builder).prefetch(pointer)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def atomic_add(typing_context, address, value):
    """Adds to the int64 at ``address`` and returns its previous value; sequentially consistent."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], PTR), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typing_context, address):
    """Loads the int64 at ``address``; sequentially consistent."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.load_atomic(builder.inttoptr(arguments[0], PTR), "seq_cst", 8, typ=I64)

    return types.int64(types.int64), codegen


@intrinsic
def relax(typing_context):
    """Tells the core that this is a spin loop."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        if platform.machine() in ("x86_64", "AMD64"):
            Emitter(builder).call("llvm.x86.sse2.pause", ir.VoidType(), ())
        return context.get_dummy_value()

    return types.void(), codegen
