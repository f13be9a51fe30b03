"""Which part of the stored tensors of a quantized weight belongs to which part of the weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch

from baton.core.errors import UnsupportedModelError

ROWS, COLUMNS = 0, 1
FLOATS = ("F32", "F16", "BF16")

Axis = tuple[int, Fraction] | int | None
"""Of a stored tensor: the dimension of the weight that it follows, and the numbers of the weight along it for which one
index stands. A number or ``None``: it is read whole, and has that many or any number of indices."""


class Slice(Protocol):
    """A tensor in a safetensors file."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor.

    Attributes:
        axes: one for each of its dimensions.
        dtypes: names of safetensors for the dtypes that it may have.
    """

    axes: tuple[Axis, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True, slots=True)
class Layout:
    """How the stored tensors follow a weight.

    Attributes:
        shape: of the weight, ``(out_features, in_features)``.
        parts: the stored tensors, by suffix.
    """

    shape: tuple[int, int]
    parts: Mapping[str, Part]

    def check(self, stored: Mapping[str, Slice]) -> None:
        """Raises :class:`UnsupportedModelError` for a tensor with another dtype or shape than this layout has."""
        for name, part in self.parts.items():
            if (dtype := stored[name].get_dtype()) not in part.dtypes:
                raise UnsupportedModelError(f"{name} is {dtype}; expected {' or '.join(part.dtypes)}")
            shape, expected = stored[name].get_shape(), [self._count(axis) for axis in part.axes]
            fits = len(shape) == len(expected) and all(
                count in (None, found) for count, found in zip(expected, shape, strict=True)
            )
            if not fits:
                wanted = ", ".join("any" if count is None else str(count) for count in expected)
                raise UnsupportedModelError(
                    f"{name} has the shape {shape}; a weight of {self.shape[0]} x {self.shape[1]} needs [{wanted}]"
                )

    def _count(self, axis: Axis) -> int | None:
        if not isinstance(axis, tuple):
            return axis
        dim, numbers = axis
        return math.ceil(self.shape[dim] / numbers)


def positive(number: object) -> int:
    """Raises :class:`ValueError` for anything but a positive whole number."""
    if type(number) is not int or number < 1:
        raise ValueError(f"{number!r} is not a positive whole number")
    return number
