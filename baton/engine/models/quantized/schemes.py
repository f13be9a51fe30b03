"""Which quantized checkpoints can be read as plain ones, by their configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.errors import UnsupportedModelError
from baton.engine.models.quantized.formats import (
    AwqFormat,
    FourBitFormat,
    GptqFormat,
    PackedFormat,
    ScaledFormat,
    WeightFormat,
)

_FP8 = ("F8_E4M3", "F8_E5M2")
_GPTQ_BITS = (2, 4, 8)
_INT8_MAX = 127


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint is quantized.

    Attributes:
        name: for messages and tables.
        libraries: modules that transformers needs in order to compute it as it is stored.
        formats: how its weights are stored; empty: they cannot be read as plain ones.
        reason: why, if they cannot.
    """

    name: str
    libraries: tuple[str, ...] = ()
    formats: tuple[WeightFormat, ...] = ()
    reason: str = ""

    @property
    def remedy(self) -> str:
        """What else a user can do, if the weights cannot be read as plain ones."""
        return "Set engine.weights: native, so that transformers computes it, or take another checkpoint of the model."


def scheme_of(config: Any) -> Scheme | None:
    """The scheme of a checkpoint, from its config of transformers; ``None`` if it is not quantized."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        text = config.get_text_config(decoder=True)
        found = getattr(text, "quantization_config", None)
    if found is None:
        return None
    settings: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    method = str(settings.get("quant_method") or ("bitsandbytes" if _is_bitsandbytes(settings) else "unknown"))
    reader = _READERS.get(method)
    if reader is None:
        return Scheme(method, reason=f"checkpoints of {method} cannot be dequantized; can be: {', '.join(_READERS)}")
    try:
        return reader(settings)
    except _UnreadableError as error:
        return Scheme(method, _LIBRARIES.get(method, ()), reason=str(error))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"the quantization_config of {method} cannot be read ({type(error).__name__}: {error})"
        return Scheme(method, _LIBRARIES.get(method, ()), reason=reason)


class _UnreadableError(Exception):
    """Why a scheme cannot be read."""


def require_formats(scheme: Scheme) -> None:
    """Raises :class:`UnsupportedModelError` for a scheme whose weights cannot be read as plain ones."""
    if not scheme.formats:
        raise UnsupportedModelError(f"{scheme.reason}. {scheme.remedy}")


def _fp8(settings: Mapping[str, Any]) -> Scheme:
    block = settings.get("weight_block_size")
    size = f"blocks of {block[0]} x {block[1]}" if block else "one scale per tensor"
    sized = (int(block[0]), int(block[1])) if block else None
    return Scheme(f"FP8 ({size})", (), (ScaledFormat("weight_scale_inv", _FP8, sized),))


def _compressed_tensors(settings: Mapping[str, Any]) -> Scheme:
    groups = list((settings.get("config_groups") or {}).values())
    formats = sorted({str(group.get("format") or settings.get("format")) for group in groups})
    if unknown := set(formats) - _COMPRESSED:
        raise _UnreadableError(
            f"compressed-tensors of the format {', '.join(sorted(unknown))} cannot be dequantized; "
            f"can be: {', '.join(sorted(_COMPRESSED))}"
        )
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _UnreadableError("compressed-tensors with transforms of activations cannot be dequantized")
    blocks = {tuple(group["weights"].get("block_structure") or ()) for group in groups if group.get("weights")} - {()}
    if len(blocks) > 1:
        raise _UnreadableError("compressed-tensors with blocks of several sizes cannot be dequantized")
    block = next(iter(blocks), None)
    sized = (int(block[0]), int(block[1])) if block else None
    scaled = ScaledFormat("weight_scale", (*_FP8, "I8"), sized)
    names = ", ".join(sorted({_compressed_name(group) for group in groups}))
    return Scheme(f"compressed-tensors ({names})", _LIBRARIES["compressed-tensors"], (scaled, PackedFormat()))


def _compressed_name(group: Mapping[str, Any]) -> str:
    """Such as W4A16."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if weights.get("type") == "float" and weights.get("num_bits") == 8:
        return "FP8"
    return f"W{weights.get('num_bits', 16)}A{inputs.get('num_bits', 16)}"


def _gptq(settings: Mapping[str, Any]) -> Scheme:
    bits, stored = int(settings.get("bits") or 0), str(settings.get("checkpoint_format") or "gptq")
    if bits not in _GPTQ_BITS or stored not in ("gptq", "gptq_v2"):
        raise _UnreadableError(
            f"GPTQ with {bits} bits in the format {stored} cannot be dequantized; can be: "
            f"{', '.join(map(str, _GPTQ_BITS))} bits in the format gptq or gptq_v2"
        )
    return Scheme(f"GPTQ ({bits} bits)", _LIBRARIES["gptq"], (GptqFormat(bits, stored == "gptq"),))


def _awq(settings: Mapping[str, Any]) -> Scheme:
    bits, version = int(settings.get("bits") or 0), str(settings.get("version") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise _UnreadableError(
            f"AWQ with {bits} bits in the version {version} cannot be dequantized; can be: 4 bits, gemm"
        )
    return Scheme("AWQ (4 bits)", _LIBRARIES["awq"], (AwqFormat(),))


def _bitsandbytes(settings: Mapping[str, Any]) -> Scheme:
    libraries = _LIBRARIES["bitsandbytes"]
    if settings.get("load_in_8bit"):
        return Scheme("bitsandbytes (int8)", libraries, (ScaledFormat("SCB", ("I8",), divisor=_INT8_MAX),))
    kind = str(settings.get("bnb_4bit_quant_type") or "fp4")
    return Scheme(f"bitsandbytes ({kind})", libraries, (FourBitFormat(kind),))


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
_COMPRESSED = {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense"}
