"""How quantized checkpoints store the weight of a linear layer, and how its numbers follow from the stored tensors.

A format says which part of each stored tensor belongs to which part of the weight, so that a rank, or a loader with
little memory, reads and computes a part alone. Products of numbers and scales are float32; GPTQ and AWQ, whose library
rounds them to the dtype of the scales, and bitsandbytes are rounded likewise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch

from baton.core.errors import UnsupportedModelError

ROWS, COLUMNS = 0, 1
_WORD_BITS = 32
_PACKED_BITS = (2, 4, 8)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column within eight of each group of four bits, from the lowest."""

Axis = tuple[int, Fraction] | None
Tensors = Mapping[str, torch.Tensor]


class Slice(Protocol):
    """A tensor in a safetensors file."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """How the stored tensors follow a weight.

    Attributes:
        shape: of the weight, ``(out_features, in_features)``.
        axes: by stored tensor, for each of its dimensions: the dimension of the weight that it follows, and the numbers
            of the weight along it for which one index stands. ``None`` is read whole.
    """

    shape: tuple[int, int]
    axes: Mapping[str, tuple[Axis, ...]]


class WeightFormat(Protocol):
    """Stored tensors have the names of the module and of one of these suffixes."""

    @property
    def required(self) -> tuple[str, ...]:
        """Suffixes; a module that has tensors of all of them is stored in this format."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Further suffixes."""

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        """How the tensors of a module follow its weight.

        Raises:
            UnsupportedModelError: they do not belong to this format.
        """

    def decode(self, tensors: Tensors, layout: Layout) -> torch.Tensor:
        """A part of the weight, ``[rows, columns]``, from the parts of the stored tensors that follow it."""


@dataclass(frozen=True, slots=True)
class ScaledFormat:
    """Numbers of 8 bits, with one scale for the tensor, for each row, or for each block.

    FP8 of DeepSeek and Qwen; ``float-quantized`` and ``int-quantized`` of compressed-tensors; int8 of bitsandbytes.

    Attributes:
        scale: suffix of the scales.
        dtypes: names of safetensors for the dtypes that the numbers may have.
        block: rows and columns of a block, where the last ones may be smaller; ``None``: as the shapes divide.
        divisor: scales are divided by it.
    """

    scale: str
    dtypes: tuple[str, ...]
    block: tuple[int, int] | None = None
    divisor: int = 1

    @property
    def required(self) -> tuple[str, ...]:
        return "weight", self.scale

    @property
    def optional(self) -> tuple[str, ...]:
        return ("weight_zero_point",)

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        rows, columns = _shape(stored["weight"], "weight")
        if (dtype := stored["weight"].get_dtype()) not in self.dtypes:
            raise UnsupportedModelError(f"a weight with scales is {dtype}; expected {' or '.join(self.dtypes)}")
        scales = stored[self.scale].get_shape()
        counts = [*scales, 1, 1][:2]
        blocks = (self._block(ROWS, rows, counts), self._block(COLUMNS, columns, counts))
        axes: tuple[Axis, ...] = tuple(
            (dim, Fraction(block)) if count > 1 else None
            for dim, (count, block) in enumerate(zip(scales, blocks, strict=False))
        )
        parts = {"weight": _plain_axes(), self.scale: axes}
        if "weight_zero_point" in stored:
            parts["weight_zero_point"] = axes
        return Layout((rows, columns), parts)

    def _block(self, dim: int, size: int, counts: list[int]) -> int:
        """Numbers of a dimension that share a scale."""
        if self.block is not None and -(-size // self.block[dim]) == counts[dim]:
            return self.block[dim]
        if not counts[dim] or size % counts[dim]:
            raise UnsupportedModelError(f"{counts[dim]} scales do not divide {size} numbers of a weight")
        return size // counts[dim]

    def decode(self, tensors: Tensors, layout: Layout) -> torch.Tensor:
        numbers, scales = tensors["weight"].float(), tensors[self.scale]
        axes = layout.axes[self.scale]
        if "weight_zero_point" in tensors:
            numbers = numbers - _spread(tensors["weight_zero_point"].float(), axes, numbers.shape)
        factors = _spread(scales.float(), axes, numbers.shape)
        return numbers * factors if self.divisor == 1 else numbers * factors / self.divisor


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """``pack-quantized`` of compressed-tensors: numbers of a row packed into words, with scales for groups of them."""

    @property
    def required(self) -> tuple[str, ...]:
        return "weight_packed", "weight_scale", "weight_shape"

    @property
    def optional(self) -> tuple[str, ...]:
        return "weight_zero_point", "weight_g_idx"

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        rows, columns = (int(size) for size in stored["weight_shape"][...])
        words = _shape(stored["weight_packed"], "weight_packed")[1]
        bits = _bits_of(words, columns)
        groups = _shape(stored["weight_scale"], "weight_scale")[1]
        along = None if "weight_g_idx" in stored else _group_axis(columns, groups)
        one, packed = Fraction(1), Fraction(_WORD_BITS // bits)
        axes: dict[str, tuple[Axis, ...]] = {
            "weight_packed": ((ROWS, one), (COLUMNS, packed)),
            "weight_scale": ((ROWS, one), along),
            "weight_shape": (None,),
        }
        if "weight_zero_point" in stored:
            axes["weight_zero_point"] = ((ROWS, packed), along)
        if "weight_g_idx" in stored:
            axes["weight_g_idx"] = ((COLUMNS, one),)
        return Layout((rows, columns), axes)

    def decode(self, tensors: Tensors, layout: Layout) -> torch.Tensor:
        bits = _WORD_BITS // int(_numbers(layout, "weight_packed", COLUMNS))
        codes = _unpack(tensors["weight_packed"], bits, COLUMNS)
        scales = tensors["weight_scale"]
        zeros = torch.full_like(scales, 1 << bits - 1, dtype=torch.int32)
        if "weight_zero_point" in tensors:
            zeros = _unpack(tensors["weight_zero_point"], bits, ROWS)[: len(scales)]
        return _grouped(codes, zeros, scales, tensors.get("weight_g_idx"))


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel write it: columns of the weight packed into words.

    Attributes:
        bits: of a number.
        stores_less_one: zero points are stored less one, in ``gptq`` but not in ``gptq_v2``.
    """

    bits: int
    stores_less_one: bool

    @property
    def required(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales", "g_idx"

    @property
    def optional(self) -> tuple[str, ...]:
        return ()

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        words, rows = _shape(stored["qweight"], "qweight")
        one, packed = Fraction(1), Fraction(_WORD_BITS // self.bits)
        axes: dict[str, tuple[Axis, ...]] = {
            "qweight": ((COLUMNS, packed), (ROWS, one)),
            "qzeros": (None, (ROWS, packed)),
            "scales": (None, (ROWS, one)),
            "g_idx": ((COLUMNS, one),),
        }
        return Layout((rows, words * _WORD_BITS // self.bits), axes)

    def decode(self, tensors: Tensors, layout: Layout) -> torch.Tensor:
        del layout
        stored = tensors["qzeros"]
        if self.stores_less_one:  # added to whole words, which undoes borrows between their numbers
            stored = stored + _word_of_ones(self.bits)
        codes = _unpack(tensors["qweight"], self.bits, 0).t()
        zeros = _unpack(stored, self.bits, 1).t()
        return _grouped(codes, zeros, tensors["scales"].t(), tensors["g_idx"]).to(tensors["scales"].dtype)


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """AWQ (Lin et al., 2023), version ``gemm``: rows of the weight packed into words, interleaved."""

    @property
    def required(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    @property
    def optional(self) -> tuple[str, ...]:
        return ()

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        columns, words = _shape(stored["qweight"], "qweight")
        along = _group_axis(columns, _shape(stored["scales"], "scales")[0])
        one, packed = Fraction(1), Fraction(len(_AWQ_ORDER))
        axes: dict[str, tuple[Axis, ...]] = {
            "qweight": ((COLUMNS, one), (ROWS, packed)),
            "qzeros": (along, (ROWS, packed)),
            "scales": (along, (ROWS, one)),
        }
        return Layout((words * len(_AWQ_ORDER), columns), axes)

    def decode(self, tensors: Tensors, layout: Layout) -> torch.Tensor:
        del layout
        codes, zeros = (_awq_unpack(tensors[name]).t() for name in ("qweight", "qzeros"))
        return _grouped(codes, zeros, tensors["scales"].t(), None).to(tensors["scales"].dtype)


@dataclass(frozen=True, slots=True)
class FourBitFormat:
    """4 bits of bitsandbytes (NF4: Dettmers et al., "QLoRA", 2023): rows one after another, two numbers to a byte.

    Attributes:
        kind: ``nf4`` or ``fp4``.
    """

    kind: str

    @property
    def required(self) -> tuple[str, ...]:
        return "weight", "weight.absmax", "weight.quant_map", self._state

    @property
    def optional(self) -> tuple[str, ...]:
        return "weight.nested_absmax", "weight.nested_quant_map"

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        state = _json_of(stored[self._state][...])
        rows, columns = (int(size) for size in state["shape"])
        block = Fraction(int(state["blocksize"]), columns)
        axes: dict[str, tuple[Axis, ...]] = {
            "weight": ((ROWS, Fraction(2, columns)), None),
            "weight.absmax": ((ROWS, block),),
            "weight.quant_map": (None,),
            self._state: (None,),
        }
        if "weight.nested_absmax" in stored:
            axes["weight.nested_absmax"] = ((ROWS, block * int(state["nested_blocksize"])),)
            axes["weight.nested_quant_map"] = (None,)
        return Layout((rows, columns), axes)

    def decode(self, tensors: Tensors, layout: Layout) -> torch.Tensor:
        state = _json_of(tensors[self._state])
        largest = tensors["weight.absmax"]
        if "weight.nested_absmax" in tensors:
            of_blocks = tensors["weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))
            largest = tensors["weight.nested_quant_map"][largest.long()] * of_blocks[: len(largest)]
            largest = largest + state["nested_offset"]
        packed = tensors["weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten().long()
        numbers = tensors["weight.quant_map"][codes]
        factors = largest.repeat_interleave(int(state["blocksize"]))[: len(numbers)]
        products = (numbers * factors).to(getattr(torch, state["dtype"]))
        return products.view(-1, layout.shape[1])


def _shape(stored: Slice, name: str) -> tuple[int, int]:
    shape = stored.get_shape()
    if len(shape) != 2:
        raise UnsupportedModelError(f"{name} has {len(shape)} dimensions; only weights of linear layers can be read")
    return shape[0], shape[1]


def _plain_axes() -> tuple[Axis, ...]:
    return (ROWS, Fraction(1)), (COLUMNS, Fraction(1))


def _group_axis(size: int, groups: int) -> Axis:
    if not groups or size % groups:
        raise UnsupportedModelError(f"{groups} groups do not divide {size} numbers of a weight")
    return None if groups == 1 else (COLUMNS, Fraction(size // groups))


def _bits_of(words: int, numbers: int) -> int:
    """Bits of a packed number; words may be filled up at the end of a row."""
    for bits in _PACKED_BITS:
        if -(-numbers * bits // _WORD_BITS) == words:
            return bits
    raise UnsupportedModelError(
        f"{numbers} numbers are packed into {words} words; only {', '.join(map(str, _PACKED_BITS))} bits can be read"
    )


def _numbers(layout: Layout, name: str, dim: int) -> Fraction:
    return next(axis[1] for axis in layout.axes[name] if axis is not None and axis[0] == dim)


def _word_of_ones(bits: int) -> int:
    return sum(1 << shift for shift in range(0, _WORD_BITS, bits))


def _unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unsigned numbers, the lowest bits of a word first, along a dimension of a matrix."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=words.device)
    shifts = shifts[:, None] if dim == 0 else shifts
    return ((words.unsqueeze(dim + 1) >> shifts) & (1 << bits) - 1).flatten(dim, dim + 1)


def _awq_unpack(words: torch.Tensor) -> torch.Tensor:
    numbers = _unpack(words, _WORD_BITS // len(_AWQ_ORDER), 1).view(len(words), -1, len(_AWQ_ORDER))
    ordered = torch.empty_like(numbers)
    ordered[..., list(_AWQ_ORDER)] = numbers
    return ordered.flatten(1)


def _grouped(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor | None
) -> torch.Tensor:
    """``(codes - zero point) * scale``, float32.

    Args:
        codes: ``[rows, columns]``; columns beyond the last group fill up words.
        zeros: ``[rows, num_groups]``; also ``scales``.
        groups: the group of each column; ``None``: equal numbers of columns, one after another.
    """
    if groups is None:
        each = codes.shape[1] // scales.shape[1]
        groups = torch.arange(codes.shape[1], device=codes.device) // each
    else:
        groups = groups.long()
        codes = codes[:, : len(groups)]
    return (codes - zeros[:, groups]).float() * scales[:, groups].float()


def _spread(values: torch.Tensor, axes: tuple[Axis, ...], shape: torch.Size) -> torch.Tensor:
    """Scales of blocks, repeated to a matrix that broadcasts to ``shape``."""
    for dim, axis in enumerate(axes):
        if axis is not None:
            values = values.repeat_interleave(int(axis[1]), dim).narrow(dim, 0, shape[dim])
    return values.reshape([*values.shape, 1, 1][:2]) if values.ndim < 2 else values


def _json_of(content: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(content.tolist()))
    return found
