"""Rows of an int8 cache in the layout of ``kv_int8``: integers, then their scale.

A chunk of keys or values becomes operands in the first cache before it is multiplied. So attention code does not depend
on the cache's encoding, and adds the same terms in the same order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from baton.core.kv_spec import SCALE_BYTES
from baton.engine.cpu.arithmetic import floats, item_size, numbers, operands, to_operand
from baton.engine.kv_cache.kv_int8 import LARGEST_TO_SCALE, SMALLEST

_I8 = np.int8(0)
_LARGEST_TO_SCALE = np.float32(LARGEST_TO_SCALE)
_SMALLEST = np.float32(SMALLEST)
_ROUNDER = np.float32(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds small numbers to integers, half to even."""


@njit(inline="always", error_model="numpy")
def row_bytes(dim):
    """Bytes of one head's key or value for one token."""
    return dim + SCALE_BYTES


@njit(error_model="numpy")
def pack_row(row, target):
    """Writes float32 ``row`` to the address ``target``; a row with a non-finite number becomes NaN."""
    largest, broken = np.float32(0), np.float32(0)
    for i in range(row.size):
        largest = max(largest, abs(row[i]))
        broken += row[i] * np.float32(0)
    scale = largest * _LARGEST_TO_SCALE if largest >= _SMALLEST else np.float32(0)
    divisor = scale if scale > np.float32(0) else np.float32(1)
    whole = operands(_I8, target, row.size)
    if broken == np.float32(0):
        for i in range(row.size):
            whole[i] = np.int8((row[i] / divisor + _ROUNDER) - _ROUNDER)
    else:
        whole[:] = _I8
        scale = np.float32(np.nan)
    floats(target + row.size, 1)[0] = scale


@njit(error_model="numpy")
def unpack_rows(kind, rows, ld, slots_at, count, dim, out):
    """Rows at ``count`` slots → operands ``[count, dim]`` at the address ``out``.

    Args:
        rows: address of the head's row in slot 0; ``ld``: bytes from slot to slot.
    """
    slots, size = numbers(slots_at, count), item_size(kind)
    for j in range(count):
        source = rows + slots[j] * ld
        whole, scale = operands(_I8, source, dim), floats(source + dim, 1)[0]
        target = operands(kind, out + j * dim * size, dim)
        for d in range(dim):
            target[d] = to_operand(kind, np.float32(whole[d]) * scale)
