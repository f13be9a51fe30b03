"""Converts rows of operands that are multiplied repeatedly to the form in which they are multiplied.

Where float32 products are faster than those of bfloat16 pairs, see :class:`baton.engine.cpu.dot.Dot`, such rows become
float32 once instead of each time; elsewhere they stay operands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from baton.engine.cpu.arithmetic import item_size
from baton.engine.cpu.emitter import is_widened, numbers_at_once
from baton.engine.cpu.vectors import is_half, widen_steps


def tile_kind(kind: Any) -> Any:
    """The type in which tiles take reused rows, as a number of that type: operands, or float32."""
    raise NotImplementedError  # for compiled code only


@overload(tile_kind)
def _tile_kind_of(kind):
    if is_widened(kind):
        return lambda kind: np.float32(0)
    return lambda kind: kind


def whole_steps(kind: Any, k: Any) -> Any:
    """Length of a row of ``k`` numbers in float32, see :func:`baton.engine.cpu.vectors.widen_steps`."""
    raise NotImplementedError  # for compiled code only


@overload(whole_steps)
def _whole_steps_of(kind, k):
    step = numbers_at_once(half=is_half(kind))
    return lambda kind, k: (k + step - 1) // step * step


@njit(inline="always", error_model="numpy")
def is_kept(kind):
    """Whether tiles take operands, so that nothing is widened."""
    return item_size(tile_kind(kind)) == item_size(kind)


@njit(error_model="numpy")
def widen_rows(kind, num_rows, x, ldx, k, out, ldo):
    """Converts rows of operands to float32, padded with zeros to :func:`whole_steps`.

    Args:
        x, out: addresses; ``ldx``, ``ldo``: bytes from row to row; ``k``: numbers of a row.
    """
    for row in range(num_rows):
        widen_steps(kind, x + row * ldx, k, out + row * ldo)
