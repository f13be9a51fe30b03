"""Which quantized checkpoints can be read as plain ones, or computed as they are stored, by their configs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoQuantizationConfig

from baton.core.errors import UnsupportedModelError
from baton.engine.models.quantized.formats import (
    FP8,
    AwqFormat,
    Block,
    FourBitFormat,
    GptqFormat,
    PackedFormat,
    ScaledFormat,
    WeightFormat,
)
from baton.engine.models.quantized.layout import positive

_GPTQ_BITS = (2, 4, 8)
_FOUR_BIT_TYPES = ("nf4", "fp4")
_INT8_MAX = 127
_FAULTS = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""Errors of settings that have other types or values than expected."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint is quantized.

    Attributes:
        name: for messages and tables.
        libraries: modules that transformers needs in order to compute it as it is stored.
        formats: how its weights are stored; empty: they cannot be read as plain ones.
        reason: why, if they cannot.
        obstacle: why transformers cannot compute it as it is stored; empty if it may.
    """

    name: str
    libraries: tuple[str, ...] = ()
    formats: tuple[WeightFormat, ...] = ()
    reason: str = ""
    obstacle: str = ""

    @property
    def remedy(self) -> str:
        """What else a user can do, if the weights cannot be read as plain ones."""
        other = "Take another checkpoint of the model."
        return (
            other if self.obstacle else f"Set engine.weights: native, so that transformers computes it, or t{other[1:]}"
        )


def scheme_of(config: Any) -> Scheme | None:
    """The scheme of a checkpoint, from its config of transformers; ``None`` if it is not quantized."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        text = config.get_text_config(decoder=True)
        found = getattr(text, "quantization_config", None)
    if found is None:
        return None
    settings = found.to_dict() if hasattr(found, "to_dict") else found
    if not isinstance(settings, Mapping):
        fault = f"the quantization_config is {settings!r} instead of a mapping"
        return Scheme("unknown", reason=fault, obstacle=fault)
    scheme = _plain_scheme(settings)
    return scheme if scheme.obstacle else replace(scheme, obstacle=_fault_for_transformers(settings))


def _plain_scheme(settings: Mapping[str, Any]) -> Scheme:
    """How the weights can be read as plain ones."""
    method = str(settings.get("quant_method") or ("bitsandbytes" if _is_bitsandbytes(settings) else "unknown"))
    reader = _READERS.get(method)
    if reader is None:
        return Scheme(method, reason=f"checkpoints of {method} cannot be dequantized; can be: {', '.join(_READERS)}")
    try:
        return reader(settings)
    except _UnreadableError as error:
        return Scheme(method, _LIBRARIES.get(method, ()), reason=str(error))
    except _FAULTS as error:
        text = str(error) if isinstance(error, _SettingError) else f"{type(error).__name__}: {error}"
        text = f"{error} is missing" if isinstance(error, KeyError) else text
        reason = f"the quantization_config of {method} cannot be read: {text}"
        obstacle = "" if isinstance(error, LookupError) else reason  # transformers has defaults for what is missing
        return Scheme(method, _LIBRARIES.get(method, ()), reason=reason, obstacle=obstacle)


def _fault_for_transformers(settings: Mapping[str, Any]) -> str:
    """Why transformers cannot read the settings; empty if it can, or if that needs a library which is not here."""
    method = settings.get("quant_method")
    if method is not None and method not in (*AUTO_QUANTIZATION_CONFIG_MAPPING, *_READERS):
        return f"transformers does not know the quant_method {method!r} of its quantization_config"
    try:
        AutoQuantizationConfig.from_dict(copy.deepcopy(dict(settings)))
    except ImportError:
        return ""
    except _FAULTS as error:
        if isinstance(error, ValidationError):  # its text has several lines and a link
            first = error.errors(include_url=False)[0]
            keys = ".".join(part for part in map(str, first["loc"]) if part.isidentifier())
            return f"transformers cannot read {keys} of its quantization_config: {first['msg']}"
        return f"transformers cannot read its quantization_config: {error}"
    return ""


class _UnreadableError(Exception):
    """Why a scheme cannot be read."""


class _SettingError(ValueError):
    """A setting has a value that cannot be read."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        super().__init__(f"{key} is {value!r}; expected {expected}")


def check_scheme(scheme: Scheme, weights: str) -> None:
    """Checks whether a quantized checkpoint can be loaded with ``engine.weights`` as given.

    Raises:
        UnsupportedModelError: transformers cannot compute it as it is stored; or, for all but ``native``, its weights
            cannot be read as plain ones.
    """
    if weights != "native" and not scheme.formats:
        raise UnsupportedModelError(f"{scheme.reason}. {scheme.remedy}")
    if weights == "native" and scheme.obstacle:
        remedy = "Set engine.weights: dequantized." if scheme.formats else "Take another checkpoint of the model."
        raise UnsupportedModelError(f"the checkpoint is {scheme.name}: {scheme.obstacle.rstrip('.')}. {remedy}")


def _fp8(settings: Mapping[str, Any]) -> Scheme:
    stated = settings.get("weight_block_size")
    block = (None, None) if stated is None else _pair(settings, "weight_block_size")
    size = "one scale per tensor" if stated is None else f"blocks of {block[0]} x {block[1]}"
    return Scheme(f"FP8 ({size})", (), (ScaledFormat("weight_scale_inv", FP8, (block,)),))


def _compressed_tensors(settings: Mapping[str, Any]) -> Scheme:
    groups = list((settings.get("config_groups") or {}).values())
    formats = sorted({str(group.get("format") or settings.get("format")) for group in groups})
    if unknown := set(formats) - _COMPRESSED:
        raise _UnreadableError(
            f"compressed-tensors of the format {', '.join(sorted(unknown))} cannot be dequantized; "
            f"can be: {', '.join(sorted(_COMPRESSED))}"
        )
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _UnreadableError(f"compressed-tensors with the sparsity {sparsity} cannot be dequantized")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _UnreadableError("compressed-tensors with transforms of activations cannot be dequantized")
    weights = [group["weights"] for group in groups if group.get("weights")]
    packed_groups = [each for each in groups if (each.get("format") or settings.get("format")) == "pack-quantized"]
    if others := sorted({_packed_name(each["weights"]) for each in packed_groups if each.get("weights")} - _PACKED):
        raise _UnreadableError(
            f"pack-quantized weights of {', '.join(others)} cannot be dequantized; can be: {', '.join(sorted(_PACKED))}"
        )
    if not weights:
        raise _UnreadableError("compressed-tensors without a group that has weights cannot be dequantized")
    blocks = tuple(dict.fromkeys(_block_of(each) for each in weights))
    zeros = {not each.get("symmetric", True) for each in weights}
    obstacle = "transformers does not load zero points of compressed-tensors" if True in zeros else ""
    packed = PackedFormat(tuple(block[1] for block in blocks), zeros.pop() if len(zeros) == 1 else None)
    names = ", ".join(sorted({_compressed_name(group) for group in groups}))
    formats_here = (ScaledFormat("weight_scale", (*FP8, "I8"), blocks), packed)
    libraries = _LIBRARIES["compressed-tensors"]
    return Scheme(f"compressed-tensors ({names})", libraries, formats_here, obstacle=obstacle)


def _block_of(weights: Mapping[str, Any]) -> Block:
    """What shares a scale in a group of compressed-tensors."""
    strategy = str(weights.get("strategy"))
    if strategy == "block":
        return _pair(weights, "block_structure")
    if strategy == "group":
        return 1, _count(weights, "group_size")
    if strategy in ("tensor", "channel"):
        return (None, None) if strategy == "tensor" else (1, None)
    raise _UnreadableError(f"compressed-tensors of the strategy {strategy} cannot be dequantized")


def _packed_name(weights: Mapping[str, Any]) -> str:
    return f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}"


def _compressed_name(group: Mapping[str, Any]) -> str:
    """Such as W4A16."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if weights.get("type") == "float" and weights.get("num_bits") == 8:
        return "FP8"
    return f"W{weights.get('num_bits', 16)}A{inputs.get('num_bits', 16)}"


def _gptq(settings: Mapping[str, Any]) -> Scheme:
    bits, stored = _count(settings, "bits"), str(settings.get("checkpoint_format") or "gptq")
    if bits not in _GPTQ_BITS or stored not in ("gptq", "gptq_v2"):
        raise _UnreadableError(
            f"GPTQ with {bits} bits in the format {stored} cannot be dequantized; can be: "
            f"{', '.join(map(str, _GPTQ_BITS))} bits in the format gptq or gptq_v2"
        )
    return Scheme(
        f"GPTQ ({bits} bits)", _LIBRARIES["gptq"], (GptqFormat(bits, _group_size(settings), stored == "gptq"),)
    )


def _awq(settings: Mapping[str, Any]) -> Scheme:
    bits, version = _count(settings, "bits"), str(settings.get("version") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise _UnreadableError(
            f"AWQ with {bits} bits in the version {version} cannot be dequantized; can be: 4 bits, gemm"
        )
    return Scheme("AWQ (4 bits)", _LIBRARIES["awq"], (AwqFormat(_group_size(settings)),))


def _bitsandbytes(settings: Mapping[str, Any]) -> Scheme:
    libraries = _LIBRARIES["bitsandbytes"]
    if settings.get("load_in_8bit"):
        return Scheme("bitsandbytes (int8)", libraries, (ScaledFormat("SCB", ("I8",), ((1, None),), _INT8_MAX),))
    kind = settings.get("bnb_4bit_quant_type") or "fp4"
    if kind not in _FOUR_BIT_TYPES:
        raise _SettingError("bnb_4bit_quant_type", kind, " or ".join(_FOUR_BIT_TYPES))
    return Scheme(f"bitsandbytes ({kind})", libraries, (FourBitFormat(kind),))


def _group_size(settings: Mapping[str, Any]) -> int | None:
    """Columns that share a scale; ``None``: all, which is stored as -1."""
    return None if settings["group_size"] == -1 else _count(settings, "group_size")


def _count(settings: Mapping[str, Any], key: str) -> int:
    try:
        return positive(settings[key])
    except ValueError as error:
        raise _SettingError(key, settings[key], "a positive whole number") from error


def _pair(settings: Mapping[str, Any], key: str) -> tuple[int, int]:
    try:
        rows, columns = settings[key]
        return positive(rows), positive(columns)
    except (TypeError, ValueError) as error:
        raise _SettingError(key, settings[key], "two positive whole numbers") from error


def _is_bitsandbytes(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))


_READERS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
}
_LIBRARIES = {
    "compressed-tensors": ("compressed_tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
}
_PACKED = {"int2", "int4", "int8"}
_COMPRESSED = {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense"}
