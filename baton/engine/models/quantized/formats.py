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
from baton.engine.models.quantized.layout import COLUMNS, FLOATS, ROWS, Axis, Layout, Part, Slice, positive

_WORD_BITS = 32
_PACKED_BITS = (2, 4, 8)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column within eight of each group of four bits, from the lowest."""

FP8 = ("F8_E4M3", "F8_E5M2")
_WORDS, _INDICES = ("I32",), ("I32", "I64")
_CODES_OF_4_BITS, _CODES_OF_8_BITS = 16, 256
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Block = tuple[int | None, int | None]
"""Rows and columns that share a scale; ``None``: all."""
Tensors = Mapping[str, torch.Tensor]


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
        blocks: what may share a scale; the last blocks of a weight may be smaller.
        divisor: scales are divided by it.
    """

    scale: str
    dtypes: tuple[str, ...]
    blocks: tuple[Block, ...]
    divisor: int = 1

    @property
    def required(self) -> tuple[str, ...]:
        return "weight", self.scale

    @property
    def optional(self) -> tuple[str, ...]:
        return ("weight_zero_point",)

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        shape = _shape(stored["weight"], "weight")
        axes = self._axes(shape, stored[self.scale].get_shape())
        scales = FLOATS if "I8" in self.dtypes and len(self.dtypes) == 1 else (*FLOATS, "F8_E8M0")
        parts = {"weight": Part(_plain_axes(), self.dtypes), self.scale: Part(axes, scales)}
        if "weight_zero_point" in stored:
            parts["weight_zero_point"] = Part(axes, ("I8", *FLOATS, *FP8))
        return Layout(shape, parts)

    def _axes(self, shape: tuple[int, int], scales: list[int]) -> tuple[Axis, ...]:
        """Those of the scales, by the first block that gives as many as are stored."""
        wanted = []
        for block in self.blocks:
            counts = [1 if each is None else -(-size // each) for size, each in zip(shape, block, strict=True)]
            if [*scales, 1, 1][:2] == counts and len(scales) <= 2:
                return tuple(
                    1 if each is None else (dim, Fraction(each)) for dim, each in enumerate(block[: len(scales)])
                )
            wanted.append(counts)
        raise UnsupportedModelError(
            f"{self.scale} has the shape {scales}; a weight of {shape[0]} x {shape[1]} needs "
            f"{' or '.join(map(str, wanted))}"
        )

    def decode(self, tensors: Tensors, layout: Layout) -> torch.Tensor:
        numbers, axes = tensors["weight"].float(), layout.parts[self.scale].axes
        if "weight_zero_point" in tensors:
            numbers = numbers - _spread(tensors["weight_zero_point"].float(), axes, numbers.shape)
        factors = _spread(tensors[self.scale].float(), axes, numbers.shape)
        return numbers * factors if self.divisor == 1 else numbers * factors / self.divisor


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """``pack-quantized`` of compressed-tensors: numbers of a row packed into words, with scales for groups of them.

    Attributes:
        group_sizes: numbers that may share a scale; ``None``: those of a row.
        has_zero_points: whether weights must have zero points; ``None``: some have.
    """

    group_sizes: tuple[int | None, ...]
    has_zero_points: bool | None

    @property
    def required(self) -> tuple[str, ...]:
        return "weight_packed", "weight_scale", "weight_shape"

    @property
    def optional(self) -> tuple[str, ...]:
        return "weight_zero_point", "weight_g_idx"

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        rows, columns = (positive(size) for size in stored["weight_shape"][...].tolist())
        bits = _bits_of(_shape(stored["weight_packed"], "weight_packed")[1], columns)
        groups = _shape(stored["weight_scale"], "weight_scale")[1]
        size = next((size for size in self.group_sizes if groups == -(-columns // (size or columns))), 0)
        if size == 0:
            raise UnsupportedModelError(f"weight_scale has {groups} groups for {columns} columns, unlike the config")
        if self.has_zero_points and "weight_zero_point" not in stored:
            raise UnsupportedModelError("weight_zero_point is missing, although the config says that there is one")
        has_order = "weight_g_idx" in stored
        along = groups if has_order or size is None else (COLUMNS, Fraction(size))
        one, packed = Fraction(1), Fraction(_WORD_BITS // bits)
        parts = {
            "weight_packed": Part(((ROWS, one), (COLUMNS, packed)), _WORDS),
            "weight_scale": Part(((ROWS, one), along)),
            "weight_shape": Part((2,), _INDICES),
        }
        if "weight_zero_point" in stored:
            parts["weight_zero_point"] = Part(((ROWS, packed), along), _WORDS)
        if has_order:
            parts["weight_g_idx"] = Part(((COLUMNS, one),), _INDICES)
        return Layout((rows, columns), parts)

    def decode(self, tensors: Tensors, layout: Layout) -> torch.Tensor:
        packed = layout.parts["weight_packed"].axes[COLUMNS]
        bits = _WORD_BITS // int(packed[1] if isinstance(packed, tuple) else 1)
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
        group_size: columns that share a scale; ``None``: all.
        stores_less_one: zero points are stored less one, in ``gptq`` but not in ``gptq_v2``.
    """

    bits: int
    group_size: int | None
    stores_less_one: bool

    @property
    def required(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales", "g_idx"

    @property
    def optional(self) -> tuple[str, ...]:
        return ()

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        words, rows = _shape(stored["qweight"], "qweight")
        columns = words * _WORD_BITS // self.bits
        groups = -(-columns // (self.group_size or columns or 1))
        one, packed = Fraction(1), Fraction(_WORD_BITS // self.bits)
        parts = {
            "qweight": Part(((COLUMNS, packed), (ROWS, one)), _WORDS),
            "qzeros": Part((groups, (ROWS, packed)), _WORDS),
            "scales": Part((groups, (ROWS, one))),
            "g_idx": Part(((COLUMNS, one),), _INDICES),
        }
        return Layout((rows, columns), parts)

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
    """AWQ (Lin et al., 2023), version ``gemm``: rows of the weight packed into words, interleaved.

    Attributes:
        group_size: columns that share a scale; ``None``: all.
    """

    group_size: int | None

    @property
    def required(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    @property
    def optional(self) -> tuple[str, ...]:
        return ()

    def layout(self, stored: Mapping[str, Slice]) -> Layout:
        columns, words = _shape(stored["qweight"], "qweight")
        along: Axis = 1 if self.group_size is None else (COLUMNS, Fraction(self.group_size))
        one, packed = Fraction(1), Fraction(len(_AWQ_ORDER))
        parts = {
            "qweight": Part(((COLUMNS, one), (ROWS, packed)), _WORDS),
            "qzeros": Part((along, (ROWS, packed)), _WORDS),
            "scales": Part((along, (ROWS, one))),
        }
        return Layout((words * len(_AWQ_ORDER), columns), parts)

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
        rows, columns = (positive(size) for size in state["shape"])
        if state["dtype"] not in _DTYPES:
            raise UnsupportedModelError(f"the dtype is {state['dtype']!r}; expected {' or '.join(_DTYPES)}")
        block = Fraction(positive(state["blocksize"]), columns)
        is_nested = "nested_blocksize" in state
        parts = {
            "weight": Part(((ROWS, Fraction(2, columns)), 1), ("U8",)),
            "weight.absmax": Part(((ROWS, block),), ("U8",) if is_nested else ("F32",)),
            "weight.quant_map": Part((_CODES_OF_4_BITS,)),
            self._state: Part((None,), ("U8",)),
        }
        if is_nested:
            if missing := [name for name in self.optional if name not in stored]:
                raise UnsupportedModelError(f"{' and '.join(missing)} of its nested scales are missing")
            parts["weight.nested_absmax"] = Part(((ROWS, block * positive(state["nested_blocksize"])),))
            parts["weight.nested_quant_map"] = Part((_CODES_OF_8_BITS,))
            float(state["nested_offset"])
        return Layout((rows, columns), parts)

    def decode(self, tensors: Tensors, layout: Layout) -> torch.Tensor:
        state = _json_of(tensors[self._state])
        largest = tensors["weight.absmax"]
        if "weight.nested_absmax" in tensors:
            of_blocks = _repeated(tensors["weight.nested_absmax"], state["nested_blocksize"], len(largest))
            largest = tensors["weight.nested_quant_map"][largest.long()] * of_blocks + state["nested_offset"]
        packed = tensors["weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten().long()
        numbers = tensors["weight.quant_map"][codes]
        factors = _repeated(largest, state["blocksize"], len(numbers))
        products = (numbers * factors).to(_DTYPES[state["dtype"]])
        return products.view(-1, layout.shape[1])


def _shape(stored: Slice, name: str) -> tuple[int, int]:
    shape = stored.get_shape()
    if len(shape) != 2:
        raise UnsupportedModelError(f"{name} has {len(shape)} dimensions; only weights of linear layers can be read")
    return shape[0], shape[1]


def _plain_axes() -> tuple[Axis, ...]:
    return (ROWS, Fraction(1)), (COLUMNS, Fraction(1))


def _bits_of(words: int, numbers: int) -> int:
    """Bits of a packed number; words may be filled up at the end of a row."""
    for bits in _PACKED_BITS:
        if -(-numbers * bits // _WORD_BITS) == words:
            return bits
    raise UnsupportedModelError(
        f"{numbers} numbers are packed into {words} words; only {', '.join(map(str, _PACKED_BITS))} bits can be read"
    )


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
        each = -(-codes.shape[1] // scales.shape[1])
        groups = torch.arange(codes.shape[1], device=codes.device) // each
    else:
        groups = groups.long()
        if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[1]:
            raise UnsupportedModelError(f"some columns are of groups that do not exist; there are {scales.shape[1]}")
        codes = codes[:, : len(groups)]
    return (codes - zeros[:, groups]).float() * scales[:, groups].float()


def _spread(values: torch.Tensor, axes: tuple[Axis, ...], shape: torch.Size) -> torch.Tensor:
    """Scales of blocks, repeated to a matrix that broadcasts to ``shape``."""
    for dim, axis in enumerate(axes):
        if isinstance(axis, tuple):
            values = values.repeat_interleave(int(axis[1]), dim).narrow(dim, 0, shape[dim])
    return values.reshape([*values.shape, 1, 1][:2]) if values.ndim < 2 else values


def _repeated(values: torch.Tensor, each: int, count: int) -> torch.Tensor:
    """The first ``count`` of values that are repeated ``each`` times."""
    return values.repeat_interleave(min(each, count))[:count]


def _json_of(content: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(content.tolist()))
    return found
