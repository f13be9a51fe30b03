"""Row-wise arithmetic in numba: norms, rotation, rounding. All values between two products are float32.

Compiled with numpy's rules for errors: dividing by zero gives infinity. An exception would leave a stage unfinished.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from baton.engine.cpu.vectors import bits_of_float, float_of_bits, pointer_to

_LOG2E = np.float32(1.4426950408889634)
# log(2) in two parts, the first of few bits, so that n * _LN2_HIGH is exact (Cody and Waite).
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_F32 = np.float32(0)


@njit(inline="always", error_model="numpy")
def floats(address, count):
    """float32 ``[count]`` at an address."""
    return carray(pointer_to(_F32, address), np.int64(count))


@njit(inline="always", error_model="numpy")
def numbers(address, count):
    """int64 ``[count]`` at an address."""
    return carray(pointer_to(0, address), np.int64(count))


@njit(inline="always", error_model="numpy")
def operands(kind, address, count):
    """``[count]`` values of the model's dtype at an address."""
    return carray(pointer_to(kind, address), np.int64(count))


def item_size(kind: Any) -> int:
    """Bytes of an operand."""
    raise NotImplementedError  # for compiled code only


@overload(item_size)
def _item_size(kind):
    size = 4 if kind == types.float32 else 2
    return lambda kind: size


def to_operand(kind: Any, value: Any) -> Any:
    """Rounds a float32 to an operand."""
    raise NotImplementedError  # for compiled code only


@overload(to_operand)
def _to_operand(kind, value):
    if kind != types.uint16:
        return lambda kind, value: value

    def rounded(kind, value):
        bits = bits_of_float(value)
        up = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
        # Rounding up could carry the bits of a NaN into those of a number.
        return np.uint16(up if value == value else np.int32(0x7FC0))

    return rounded


def from_operand(kind: Any, value: Any) -> Any:
    """Converts an operand to float32."""
    raise NotImplementedError  # for compiled code only


@overload(from_operand)
def _from_operand(kind, value):
    if kind != types.uint16:
        return lambda kind, value: value
    return lambda kind, value: float_of_bits(np.int32(np.int32(value) << np.int32(16)))


def whole_to_operand(kind: Any, value: Any) -> Any:
    """Converts an int8 to an operand, which is exact."""
    raise NotImplementedError  # for compiled code only


@overload(whole_to_operand)
def _whole_to_operand(kind, value):
    if kind != types.uint16:
        return lambda kind, value: np.float32(value)
    return lambda kind, value: np.uint16(bits_of_float(np.float32(value)) >> np.int32(16))


@njit(inline="always", error_model="numpy")
def exp(x):
    """e**x to float32 precision; 0 below -87, NaN stays NaN. It vectorises, unlike a call into libm."""
    low = x < np.float32(-87.0)
    bounded = np.float32(-87.0) if low else x
    bounded = np.float32(88.0) if bounded > np.float32(88.0) else bounded
    # Adding and subtracting 1.5 * 2**23 rounds to an integer.
    shifted = bounded * _LOG2E + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    r = bounded - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * (r * r) + r + np.float32(1.0)
    scale = float_of_bits((bits_of_float(shifted) - np.int32(0x4B400000) + np.int32(127)) << np.int32(23))
    return np.float32(0.0) if low else y * scale


@njit(error_model="numpy", fastmath={"reassoc", "contract"})
def _mean_square(row):
    total = _F32
    for i in range(row.size):
        total += row[i] * row[i]
    return total / np.float32(row.size)


@njit(error_model="numpy")
def rms_norm(kind, row, weight, eps, out):
    """``out = row / rms(row) * weight``; ``weight`` and ``out`` are operands, ``row`` is float32."""
    factor = np.float32(1.0) / np.float32(np.sqrt(_mean_square(row) + eps))
    for i in range(row.size):
        out[i] = to_operand(kind, row[i] * factor * from_operand(kind, weight[i]))


@njit(error_model="numpy")
def rms_norm_in_place(kind, row, weight, eps):
    """Like :func:`rms_norm`, in place, for the norms of queries and keys."""
    factor = np.float32(1.0) / np.float32(np.sqrt(_mean_square(row) + eps))
    for i in range(row.size):
        row[i] = row[i] * factor * from_operand(kind, weight[i])


@njit(error_model="numpy")
def rotate(kind, row, cos, sin, out):
    """Rotary embedding of one head, whose halves are the two sides of the pairs (arXiv 2104.09864)."""
    half = cos.size
    for i in range(half):
        out[i] = to_operand(kind, row[i] * cos[i] - row[half + i] * sin[i])
    for i in range(half):
        out[half + i] = to_operand(kind, row[half + i] * cos[i] + row[i] * sin[i])


@njit(error_model="numpy")
def rotate_in_place(row, cos, sin):
    """Like :func:`rotate`, in place, in float32."""
    half = cos.size
    for i in range(half):
        first, second = row[i], row[half + i]
        row[i] = first * cos[i] - second * sin[i]
        row[half + i] = second * cos[i] + first * sin[i]


@njit(error_model="numpy")
def round_row(kind, row, out):
    for i in range(row.size):
        out[i] = to_operand(kind, row[i])


@njit(error_model="numpy")
def widen_row(kind, row, out):
    for i in range(row.size):
        out[i] = from_operand(kind, row[i])


@njit(error_model="numpy")
def add_row(total, row):
    for i in range(row.size):
        total[i] += row[i]


@njit(error_model="numpy")
def add_operands(kind, total, row):
    for i in range(row.size):
        total[i] += from_operand(kind, row[i])


@njit(error_model="numpy")
def scale_row(row, factor):
    for i in range(row.size):
        row[i] *= factor


@njit(error_model="numpy")
def scale_by(row, factors):
    for i in range(row.size):
        row[i] *= factors[i]
