"""The tensors of a quantized checkpoint under the names and with the shapes of a plain one, computed when read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.models.quantized.formats import WeightFormat
from baton.engine.models.quantized.layout import Layout, Slice
from baton.engine.models.quantized.schemes import Scheme

INDEX = "model.safetensors.index.json"
_NUMBERS_AT_ONCE = 1 << 24
"""Numbers of a weight computed at once, which bounds the memory of intermediate results."""
_QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "I32")
_FAULTS = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)
"""Errors of layouts that are computed from damaged tensors."""
_BESIDE_WEIGHTS = (
    "input_scale",
    "activation_scale",
    "input_zero_point",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "weight_format",
)
"""Suffixes of tensors that describe activations or the KV of other engines."""

Region = tuple[range, range]


class PlainWeight:
    """A weight ``[out_features, in_features]`` that is computed from quantized numbers when a part of it is read.

    Has the methods of a slice of safetensors, so that transformers loads it, or this rank's part, like any other.

    Args:
        name: of the weight, for messages.
        stored: the tensors of its module, by suffix.
        dtype: of the parts that are read.
        device: where they are computed.

    Raises:
        UnsupportedModelError: the tensors do not belong to the format.
    """

    def __init__(
        self,
        name: str,
        stored: Mapping[str, Slice],
        weight_format: WeightFormat,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stored, self._format, self._dtype, self._device = stored, weight_format, dtype, device
        self._name = name
        try:
            self._layout = weight_format.layout(stored)
            self._layout.check(stored)
        except UnsupportedModelError as error:
            raise self._unreadable(error.message) from error
        except _FAULTS as error:
            raise self._unreadable(f"{type(error).__name__}: {error}") from error
        self._granules = _granules(self._layout)

    def get_shape(self) -> list[int]:
        return list(self._layout.shape)

    def get_dtype(self) -> str:
        return "BF16" if self._dtype is torch.bfloat16 else "F16" if self._dtype is torch.float16 else "F32"

    def __getitem__(self, index: EllipsisType | slice | tuple[slice, ...]) -> torch.Tensor:
        rows, columns = _region(index, self._layout.shape)
        result = torch.empty((len(rows), len(columns)), dtype=self._dtype, device=self._device)
        if not result.numel():
            return result
        wide = _widened(columns, self._granules[1], self._layout.shape[1])
        inside = slice(columns.start - wide.start, columns.stop - wide.start)
        for tall in _pieces(_widened(rows, self._granules[0], self._layout.shape[0]), self._granules[0], len(wide)):
            first, last = max(rows.start, tall.start), min(rows.stop, tall.stop)
            part = self._compute((tall, wide))
            result[first - rows.start : last - rows.start] = part[first - tall.start : last - tall.start, inside]
        return result

    def _compute(self, region: Region) -> torch.Tensor:
        tensors = {}
        for name, part in self._layout.parts.items():
            index = []
            for axis in part.axes:
                if isinstance(axis, tuple):
                    dim, numbers = axis
                    index.append(slice(int(region[dim].start / numbers), math.ceil(region[dim].stop / numbers)))
                else:
                    index.append(slice(None))
            tensors[name] = self._stored[name][tuple(index) or ...].to(self._device)
        try:
            return self._format.decode(tensors, self._layout)
        except UnsupportedModelError as error:
            raise self._unreadable(error.message) from error

    def _unreadable(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._name} cannot be read: {reason}. The checkpoint is damaged, or its config is that of another one; "
            "fetch it again."
        )


@contextmanager
def plain_tensors(
    folder: Path, scheme: Scheme, dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Slice | PlainWeight]]:
    """The tensors of the checkpoint in a folder, by name; those that are not quantized are the stored ones.

    Valid within the context, which keeps the files open.

    Raises:
        ConfigError: there are no safetensors files, or they are broken; see :func:`checkpoint_files`.
        UnsupportedModelError: a quantized tensor is stored in a way that the scheme does not describe.
    """
    with ExitStack() as opened:
        stored: dict[str, Slice] = {}
        for file, wanted in checkpoint_files(folder).items():
            try:
                content: Any = opened.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"model: {file} could not be read: {error}") from error
            names = content.keys()
            if wanted is not None and (missing := wanted.difference(names)):
                raise ConfigError(f"model: {file} lacks {min(missing)}, which {INDEX} says is in it. Fetch it again.")
            stored.update({name: content.get_slice(name) for name in (wanted or names)})
        yield plain_views(stored, scheme, dtype, device)


def checkpoint_files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a checkpoint, and the tensors of each that its index names; ``None`` without an index.

    Raises:
        ConfigError: there are none, or the index cannot be read or names files that are not there.
    """
    index = folder / INDEX
    found: dict[Path, set[str] | None] = {}
    if not index.is_file():
        found[folder / "model.safetensors"] = None
    else:
        try:
            for tensor, name in json.loads(index.read_text("utf-8"))["weight_map"].items():
                if Path(name).name != name:
                    raise ValueError(f"{name} is not the name of a file")
                tensors = found.setdefault(folder / name, set())
                if tensors is not None:
                    tensors.add(tensor)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"model: {index} could not be read: {error!r}") from error
    if missing := [file for file in found if not file.is_file()]:
        raise ConfigError(
            f"model: there is no file {missing[0]}. Expected a checkpoint of model.safetensors, or of {INDEX} and the "
            "files that it names; fetch it again."
        )
    return found


def plain_views(
    stored: Mapping[str, Slice], scheme: Scheme, dtype: torch.dtype, device: torch.device
) -> dict[str, Slice | PlainWeight]:
    """Like :func:`plain_tensors`, for the tensors of all files."""
    rest = dict(stored)
    found: dict[str, Slice | PlainWeight] = {}
    for weight_format in scheme.formats:
        marker = f".{weight_format.required[1]}"
        for module in [name.removesuffix(marker) for name in rest if name.endswith(marker)]:
            required = {suffix: f"{module}.{suffix}" for suffix in weight_format.required}
            if not all(name in rest for name in required.values()):
                continue
            names = required | {suffix: f"{module}.{suffix}" for suffix in weight_format.optional}
            parts = {suffix: rest.pop(name) for suffix, name in names.items() if name in rest}
            weight = f"{module}.weight"
            found[weight] = PlainWeight(weight, parts, weight_format, dtype, device)
    _check_rest(rest, found, scheme)
    for name, tensor in rest.items():
        if name.endswith(_BESIDE_WEIGHTS):
            continue
        found[name] = tensor
    return found


def _check_rest(rest: Mapping[str, Slice], weights: Mapping[str, object], scheme: Scheme) -> None:
    """Checks what is left when the tensors of all weights have been found.

    Raises:
        UnsupportedModelError: a weight lacks tensors, or is there twice; or a tensor is stored in another way.
    """
    for name, tensor in rest.items():
        if name in weights:
            raise UnsupportedModelError(f"{name} is there twice, plain and quantized. Fetch the checkpoint again.")
        if name.endswith(_BESIDE_WEIGHTS):
            continue
        is_quantized = tensor.get_dtype() in _QUANTIZED_DTYPES
        for each in scheme.formats:
            suffix = next((suffix for suffix in each.required if name.endswith(f".{suffix}")), "")
            module = name.removesuffix(f".{suffix}")
            lacking = [other for other in each.required if f"{module}.{other}" not in rest]
            if suffix and lacking and (is_quantized or suffix != "weight"):
                raise UnsupportedModelError(
                    f"{module} has {suffix} but lacks {' and '.join(lacking)}. Fetch the checkpoint again."
                )
        if is_quantized:
            raise UnsupportedModelError(
                f"{name} is {tensor.get_dtype()}, which is not how {scheme.name} stores a weight of a linear layer. "
                f"{scheme.remedy}"
            )


def check_plain(folder: Path) -> None:
    """Refuses quantized weights of a checkpoint whose config does not mention them: their codes are not the weights.

    Raises:
        UnsupportedModelError: there are such weights.
    """
    for file in folder.glob("*.safetensors"):
        if not file.is_file():
            continue
        try:
            with safe_open(file, framework="pt") as content:
                dtypes = {name: content.get_slice(name).get_dtype() for name in content.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):  # transformers says what is wrong with the file
            continue
        for name, dtype in dtypes.items():
            if name.endswith(".weight") and dtype in _QUANTIZED_DTYPES:
                raise UnsupportedModelError(
                    f"{name} is {dtype}, but the config has no quantization_config, which would say what that means. "
                    "Take the config.json that belongs to the checkpoint."
                )


def _region(index: EllipsisType | slice | tuple[slice, ...], shape: tuple[int, int]) -> Region:
    """The rows and columns that an index selects.

    Raises:
        TypeError: it is not made of slices with a step of one.
    """
    parts = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
    ranges = []
    for size, part in zip(shape, (*parts, *(slice(None),) * (2 - len(parts))), strict=True):
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError(f"weights are read by slices with a step of one, not by {part!r}")
        start, stop, _ = part.indices(size)
        ranges.append(range(start, max(start, stop)))
    return ranges[0], ranges[1]


def _granules(layout: Layout) -> tuple[int, int]:
    """Numbers along either dimension with which every stored tensor can be cut."""
    granules = []
    for dim, size in enumerate(layout.shape):
        numerators = [
            axis[1].numerator
            for part in layout.parts.values()
            for axis in part.axes
            if isinstance(axis, tuple) and axis[0] == dim
        ]
        granules.append(min(size, math.lcm(*numerators)) if numerators else size)
    return granules[0], granules[1]


def _widened(part: range, granule: int, size: int) -> range:
    return range(part.start // granule * granule, min(size, -(-part.stop // granule) * granule))


def _pieces(rows: range, granule: int, width: int) -> Iterator[range]:
    """Consecutive rows, a multiple of the granule each, of limited size."""
    each = max(1, _NUMBERS_AT_ONCE // (granule * width)) * granule
    for start in range(rows.start, rows.stop, each):
        yield range(start, min(rows.stop, start + each))
