"""Matrix products ``x @ w.T`` of a band of ``w``'s rows, tile by tile."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from baton.engine.cpu.arithmetic import floats, item_size, operands, scale_by, whole_to_operand
from baton.engine.cpu.emitter import LONGEST_STEP, is_widened
from baton.engine.cpu.nibbles import (
    GROUP,
    GROUP_BYTES,
    GROUP_ROWS,
    dot_band_int4,
    widen_group_int4,
    widen_halves,
)
from baton.engine.cpu.vectors import dot_tile, dot_tile_int8, dot_tile_part, prefetch
from baton.engine.cpu.widening import is_kept, tile_kind, whole_steps, widen_rows

BAND = GROUP_ROWS
"""Rows of a weight that are multiplied with all tokens while they are in the first cache."""
MOST_ROWS = 256
"""Limit for the rows of ``x`` in one product."""
_LINE_BYTES = 64
_WORTH_BYTES = 2 * 4 * BAND
_CACHE_BYTES = 28 << 10
"""Usable size of a first cache of 32 KiB."""
_PART_BYTES = 2304
"""Bytes of a part of a row: four rows of ``x`` and half a band of this length stay in the first cache."""
_PART_NUMBERS = 576
"""Numbers of a part of a float32 row: four rows of ``x`` and a band of this length stay in a first cache of 48 KiB."""
MANY_ROWS = 64
"""From this many rows on, a product is bound by its caches, with fewer by memory."""
_SUMS_BYTES = 4 * 4 * 64
_ALL_SUMS_BYTES = MOST_ROWS // 4 * (BAND // 4) * _SUMS_BYTES


def band_scratch_bytes(widest: int, item_bytes: int, *, is_quantized: bool) -> int:
    """Size of the scratch memory of :func:`band_product`.

    Args:
        widest: length of the longest weight row.
        is_quantized: whether some weights are int8 or int4.
    """
    groups = -(-widest // GROUP)
    band = groups * (BAND * GROUP * item_bytes + _WORTH_BYTES) if is_quantized else 0
    return _ALL_SUMS_BYTES + int(_widened_bytes.py_func(widest)) + band


@njit(error_model="numpy")
def _widened_bytes(k):
    """Memory for four rows of ``x`` in float32, or for a part of them and of a band."""
    return 4 * max(4 * (k // 4 * 4 + LONGEST_STEP), (4 + BAND) * (_PART_NUMBERS + LONGEST_STEP))


@njit(error_model="numpy")
def band_product(kind, x, ldx, num_rows, weight, scales, grouped, first, width, k, out, ldo, scratch):
    """Columns ``[first, first + width)`` of the product, at most :data:`BAND`.

    Args:
        x: address of operands ``[num_rows, k]``, at most :data:`MOST_ROWS` of them.
        weight: address of operands or int8 ``[columns, k]``.
        ldx, ldo: bytes from row to row.
        scales: address of float32 ``[columns]``, the scales of int8 rows; 0 means that the weights are operands.
        grouped: the weights are int4, and ``scales`` is the address of their groups' steps and minimums.
        first: a multiple of :data:`BAND`.
        out: address of float32, of the first of these columns.
        scratch: address of :func:`band_scratch_bytes`, for partial sums, widened rows of ``x``, and int8 and int4
            weights as operands.
    """
    ldw, spare = k * item_size(kind), scratch + _ALL_SUMS_BYTES + _widened_bytes(k)
    if scales == 0:
        _operand_product(kind, x, ldx, num_rows, weight + first * ldw, ldw, width, k, out, ldo, scratch)
        return
    if grouped:
        _grouped_product(kind, x, ldx, num_rows, weight, scales, first // BAND, width, k, out, ldo, scratch, spare)
        return
    w = weight + first * k
    if num_rows == 1 and width == BAND:
        dot_tile_int8(kind, 16, BAND, x, w, k, w + BAND * k, k, out)
    else:
        _widen_band(kind, w, width, k, spare)
        if width == BAND:
            _tiles(kind, x, ldx, num_rows, spare, ldw, w + BAND * k, BAND * k // ldw, k, out, ldo, scratch)
        else:
            _single_columns(kind, x, ldx, num_rows, spare, ldw, width, k, out, ldo)
    factors = floats(scales + 4 * first, width)
    for i in range(num_rows):
        scale_by(floats(out + i * ldo, width), factors)


@njit(error_model="numpy")
def _grouped_product(kind, x, ldx, num_rows, weight, scales, band, width, k, out, ldo, sums, scratch):
    """The product with a band of int4; ``scratch`` holds its groups' steps and minimums, then the band as operands."""
    groups = (k + GROUP - 1) // GROUP
    w, halves = weight + band * groups * GROUP_BYTES, scales + band * groups * _WORTH_BYTES // 2
    widen_worth(halves, groups, scratch)
    if num_rows == 1 and width == BAND:
        dot_band_int4(kind, x, w, scratch, k, out)
        return
    band_operands, ldw = scratch + groups * _WORTH_BYTES, groups * GROUP * item_size(kind)
    widen_groups(kind, w, halves, groups, scratch, band_operands, ldw)
    if width == BAND:
        _tiles(kind, x, ldx, num_rows, band_operands, ldw, 0, 0, k, out, ldo, sums)
    else:
        _single_columns(kind, x, ldx, num_rows, band_operands, ldw, width, k, out, ldo)


@njit(error_model="numpy")
def widen_worth(halves, groups, out):
    """Widens the steps and minimums of a band's int4 groups from float16 to float32."""
    for i in range(2 * groups):
        widen_halves(halves + i * 2 * BAND, out + i * 4 * BAND)


@njit(error_model="numpy")
def widen_groups(kind, w, halves, groups, worth, out, ldo):
    """Converts a band of int4 to operands ``[16, 32 * groups]``; prefetches the next band.

    Args:
        halves, worth: addresses of the groups' steps and minimums, see :func:`widen_worth`.
        ldo: bytes from row to row of ``out``.
    """
    for group in range(groups):
        for line in range(0, GROUP_BYTES, _LINE_BYTES):
            prefetch(w + (groups + group) * GROUP_BYTES + line)
        prefetch(halves + (groups + group) * _WORTH_BYTES // 2)
        place = out + group * GROUP * item_size(kind)
        widen_group_int4(kind, w + group * GROUP_BYTES, worth + group * _WORTH_BYTES, place, ldo)


@njit(error_model="numpy")
def _operand_product(kind, x, ldx, num_rows, w, ldw, width, k, out, ldo, sums):
    if width != BAND:
        _single_columns(kind, x, ldx, num_rows, w, ldw, width, k, out, ldo)
    elif num_rows == 1:
        dot_tile(kind, kind, 1, 16, 0, BAND, x, ldx, w, ldw, 0, w + BAND * ldw, k, out, ldo)
    else:
        _tiles(kind, x, ldx, num_rows, w, ldw, w + BAND * ldw, BAND, k, out, ldo, sums)


@njit(error_model="numpy")
def _tiles(kind, x, ldx, num_rows, w, ldw, ask, num_asked, k, out, ldo, sums):
    """Multiplies a whole band with every row of ``x``.

    Meanwhile ``num_asked * ldw`` bytes from ``ask`` on, the next band, are prefetched. Every tile prefetches a little,
    so that loading spans the whole product: prefetching all at once would finish late and then leave the memory idle.
    """
    squares = num_rows // 4 * 4
    if squares >= MANY_ROWS:
        _many_tiles(kind, x, ldx, squares, w, ldw, ask, num_asked, k, out, ldo, sums)
        num_asked = 0
    elif squares:
        _square_tiles(kind, x, ldx, squares, w, ldw, BAND, ask, num_asked, k, out, ldo, sums)
        num_asked = 0
    i = squares
    if i + 2 <= num_rows:
        for j in range(0, BAND, 8):
            x_rows, w_rows, place = x + i * ldx, w + j * ldw, out + i * ldo + 4 * j
            if num_asked > 0:
                dot_tile(kind, kind, 2, 8, 0, 8, x_rows, ldx, w_rows, ldw, 0, ask, k, place, ldo)
                ask += 8 * ldw
                num_asked -= 8
            else:
                dot_tile(kind, kind, 2, 8, 0, 0, x_rows, ldx, w_rows, ldw, 0, 0, k, place, ldo)
        i += 2
    if i < num_rows:
        dot_tile(kind, kind, 1, 16, 0, 0, x + i * ldx, ldx, w, ldw, 0, 0, k, out + i * ldo, ldo)


@njit(error_model="numpy")
def _square_tiles(kind, x, ldx, num_rows, w, ldw, width, ask, num_asked, k, out, ldo, sums):
    """``width`` columns with four rows of ``x`` at a time, widened into memory after ``sums`` where that is faster."""
    x_kind = tile_kind(kind)
    num_tiles = width // 4 * min(BAND // 4, num_rows // 4)
    each = (num_asked + num_tiles - 1) // num_tiles
    for i in range(0, num_rows, 4):
        x_rows, ldr = x + i * ldx, ldx
        if not is_kept(kind):
            x_rows, ldr = sums + _ALL_SUMS_BYTES, 4 * whole_steps(kind, k)
            widen_rows(kind, 4, x + i * ldx, ldx, k, x_rows, ldr)
        for j in range(0, width, 4):
            asked = min(each, num_asked)
            _square_tile(x_kind, kind, asked, x_rows, ldr, w + j * ldw, ldw, ask, k, out + i * ldo + 4 * j, ldo)
            ask += asked * ldw
            num_asked -= asked


def _many_tiles(*arguments: Any) -> None:
    """Like :func:`_square_tiles`, for a band with :data:`MANY_ROWS` or more."""
    raise NotImplementedError  # for compiled code only


@overload(_many_tiles)
def _many_tiles_of(kind, x, ldx, num_rows, w, ldw, ask, num_asked, k, out, ldo, sums):
    return _widened_tiles if is_widened(kind) else _tiles_in_parts


def _tiles_in_parts(kind, x, ldx, num_rows, w, ldw, ask, num_asked, k, out, ldo, sums):
    """Multiplies long rows in parts; between them the partial sums are in ``sums``."""
    # This many columns' weights stay in the first cache, with four rows of x.
    at_once = BAND if (BAND + 4) * ldw <= _CACHE_BYTES else BAND // 2
    part = k
    if ldw > _PART_BYTES:
        part = _part_length(k, (ldw + _PART_BYTES - 1) // _PART_BYTES)
    for j in range(0, BAND, at_once):
        asked = min(num_asked, (num_asked * at_once + BAND - 1) // BAND)
        columns, place = w + j * ldw, out + 4 * j
        if part >= k:
            _square_tiles(kind, x, ldx, num_rows, columns, ldw, at_once, ask, asked, k, place, ldo, sums)
        else:
            _part_tiles(kind, x, ldx, num_rows, columns, ldw, at_once, ask, asked, k, part, place, ldo, sums)
        ask += asked * ldw
        num_asked -= asked


@njit(error_model="numpy")
def _part_length(k, num_parts):
    return ((k + num_parts - 1) // num_parts + 63) // 64 * 64


@njit(error_model="numpy")
def _part_tiles(kind, x, ldx, num_rows, w, ldw, width, ask, num_asked, k, part, out, ldo, sums):
    num_tiles = width // 4 * (BAND // 4)
    each = (num_asked + num_tiles - 1) // num_tiles
    for begin in range(0, k, part):
        at, place, next_row, left = begin * item_size(kind), sums, ask, num_asked
        length = min(part, k - begin)
        for i in range(0, num_rows, 4):
            for j in range(0, width, 4):
                asked = min(each, left)
                _part_tile(
                    kind, asked, begin == 0, begin + part >= k, x + i * ldx + at, ldx, w + j * ldw + at, ldw,
                    next_row + at, length, place, out + i * ldo + 4 * j, ldo,
                )  # fmt: skip
                place += _SUMS_BYTES
                next_row += asked * ldw
                left -= asked


def _widened_tiles(kind, x, ldx, num_rows, w, ldw, ask, num_asked, k, out, ldo, sums):
    """Widens both sides to float32, in parts that stay in the first cache.

    The columns are widened once for all rows; the rows, four at a time, once for each band, a twelfth of the time.
    """
    part, f32 = k, np.float32(0)
    if k > _PART_NUMBERS:
        part = _part_length(k, (k + _PART_NUMBERS - 1) // _PART_NUMBERS)
    ldr, next_line = 4 * whole_steps(kind, part), ask
    rows, columns = sums + _ALL_SUMS_BYTES, sums + _ALL_SUMS_BYTES + 4 * ldr
    end = ask + num_asked * ldw
    for begin in range(0, k, part):
        at, place, length = begin * item_size(kind), sums, min(part, k - begin)
        whole = whole_steps(kind, length)
        widen_rows(kind, BAND, w + at, ldw, length, columns, ldr)
        is_first, is_last = begin == 0, begin + part >= k
        for i in range(0, num_rows, 4):
            widen_rows(kind, 4, x + i * ldx + at, ldx, length, rows, ldr)
            for j in range(0, BAND, 4):
                tile, target = columns + j * ldr, out + i * ldo + 4 * j
                if next_line < end:
                    prefetch(next_line)
                    next_line += _LINE_BYTES
                if is_first and is_last:
                    dot_tile(f32, f32, 4, 4, 0, 0, rows, ldr, tile, ldr, 0, 0, whole, target, ldo)
                elif is_first:
                    dot_tile_part(f32, 4, 4, 0, -1, rows, ldr, tile, ldr, 0, whole, place, target, ldo)
                elif is_last:
                    dot_tile_part(f32, 4, 4, 0, 1, rows, ldr, tile, ldr, 0, whole, place, target, ldo)
                else:
                    dot_tile_part(f32, 4, 4, 0, 0, rows, ldr, tile, ldr, 0, whole, place, target, ldo)
                place += _SUMS_BYTES


@njit(error_model="numpy")
def _square_tile(x_kind, kind, asked, x, ldx, w, ldw, ask, k, out, ldo):
    """Prefetches ``asked`` rows or a few more; each number of rows is separate code."""
    if asked <= 0:
        dot_tile(x_kind, kind, 4, 4, 0, 0, x, ldx, w, ldw, 0, ask, k, out, ldo)
    elif asked == 1:
        dot_tile(x_kind, kind, 4, 4, 0, 1, x, ldx, w, ldw, 0, ask, k, out, ldo)
    elif asked == 2:
        dot_tile(x_kind, kind, 4, 4, 0, 2, x, ldx, w, ldw, 0, ask, k, out, ldo)
    else:
        dot_tile(x_kind, kind, 4, 4, 0, 4, x, ldx, w, ldw, 0, ask, k, out, ldo)


@njit(error_model="numpy")
def _part_tile(kind, asked, is_first, is_last, x, ldx, w, ldw, ask, k, sums, out, ldo):
    """Multiplies a part of the rows' length; prefetches at most one row, which suffices with many tiles."""
    if asked <= 0:
        if is_first:
            dot_tile_part(kind, 4, 4, 0, -1, x, ldx, w, ldw, ask, k, sums, out, ldo)
        elif is_last:
            dot_tile_part(kind, 4, 4, 0, 1, x, ldx, w, ldw, ask, k, sums, out, ldo)
        else:
            dot_tile_part(kind, 4, 4, 0, 0, x, ldx, w, ldw, ask, k, sums, out, ldo)
    elif is_first:
        dot_tile_part(kind, 4, 4, 1, -1, x, ldx, w, ldw, ask, k, sums, out, ldo)
    elif is_last:
        dot_tile_part(kind, 4, 4, 1, 1, x, ldx, w, ldw, ask, k, sums, out, ldo)
    else:
        dot_tile_part(kind, 4, 4, 1, 0, x, ldx, w, ldw, ask, k, sums, out, ldo)


@njit(error_model="numpy")
def _single_columns(kind, x, ldx, num_rows, w, ldw, width, k, out, ldo):
    for i in range(num_rows):
        for j in range(width):
            dot_tile(kind, kind, 1, 1, 0, 0, x + i * ldx, ldx, w + j * ldw, ldw, 0, 0, k, out + i * ldo + 4 * j, ldo)


@njit(error_model="numpy")
def _widen_band(kind, w, width, k, out):
    """int8 ``[width, k]`` → operands."""
    size = item_size(kind)
    for j in range(width):
        _widen_whole(kind, operands(np.int8(0), w + j * k, k), operands(kind, out + j * k * size, k))


@njit(error_model="numpy")
def _widen_whole(kind, whole, out):
    for i in range(whole.size):
        out[i] = whole_to_operand(kind, whole[i])
