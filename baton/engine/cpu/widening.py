"""Rows of operands that are multiplied again and again, as what they are multiplied as.

Where products of float32 are faster than those of pairs of bfloat16, see :class:`baton.engine.cpu.dot.Dot`, such rows
become float32 once instead of each time; elsewhere operands are what tiles take.
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
    """What tiles take of rows that are used again, as a number of that type: operands, or float32."""
    raise NotImplementedError  # for compiled code only


@overload(tile_kind)
def _tile_kind_of(kind):
    if is_widened(kind):
        return lambda kind: np.float32(0)
    return lambda kind: kind


def whole_steps(kind: Any, k: Any) -> Any:
    """Numbers of a row of ``k`` in float32, see :func:`baton.engine.cpu.vectors.widen_steps`."""
    raise NotImplementedError  # for compiled code only


@overload(whole_steps)
def _whole_steps_of(kind, k):
    step = numbers_at_once(half=is_half(kind))
    return lambda kind, k: (k + step - 1) // step * step


@njit(inline="always", error_model="numpy")
def is_kept(kind):
    """Whether operands are what tiles take: nothing is to be widened."""
    return item_size(tile_kind(kind)) == item_size(kind)


@njit(error_model="numpy")
def widen_rows(kind, num_rows, x, ldx, k, out, ldo):
    """Rows of operands → float32, filled up with zeros to :func:`whole_steps`.

    Args:
        x, out: addresses; ``ldx``, ``ldo``: bytes from row to row; ``k``: numbers of a row.
    """
    for row in range(num_rows):
        widen_steps(kind, x + row * ldx, k, out + row * ldo)
