"""Linear layers in fp8 (e4m3): half of the bytes of bfloat16 to read, and the tensor cores' fp8 rate.

A row of a weight is e4m3 times one float32; so is a token's row of activations, whose scale is computed in each
forward. The largest number of a row becomes the largest number of e4m3 (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022). With a scale per token, a token's result does not depend on the other tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import ScalingType, scaled_mm
from transformers import PreTrainedModel

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.attention.latent import is_absorbed
from baton.engine.models.fp8_range import LARGEST, LEAST

_MIN_CAPABILITY = (8, 9)
_SIDE_MULTIPLE = 16
"""Divisor of both sides of a weight, required by tensor cores; other layers stay as they are."""

RowQuantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Fp8Linear(nn.Module):
    """Replaces an ``nn.Linear``, computing in fp8.

    Args:
        linear: a bfloat16 layer; its weight is not kept.
        quantize: converts rows of activations to e4m3, as :func:`quantize_rows` does.
    """

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: nn.Linear, quantize: RowQuantizer) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape  # of a rank's part, unlike those of the layer
        weight, scales = quantize_rows(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.t().contiguous())
        self.bias = linear.bias
        self._quantize = quantize

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """bfloat16 ``[..., in_features]`` to ``[..., out_features]``."""
        rows, scales = self._quantize(activations.reshape(-1, self.in_features))
        output = scaled_mm(
            rows,
            self.weight.t(),
            scales,
            ScalingType.RowWise,
            self.scales,
            ScalingType.RowWise,
            output_dtype=activations.dtype,
        )
        if self.bias is not None:
            output = output + self.bias
        return output.view(*activations.shape[:-1], self.out_features)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as e4m3 and their scales, float32 ``[num_rows, 1]``; a row with a NaN or an infinity becomes NaN."""
    numbers = rows.float()
    scales = numbers.abs().amax(dim=1, keepdim=True).clamp_min(LEAST) / LARGEST
    return (numbers / scales).to(torch.float8_e4m3fn), scales


def make_linears_fp8(model: PreTrainedModel) -> None:
    """Replaces the decoder's linear layers by :class:`Fp8Linear`, one by one, and drops their weights.

    The embedding, the head, norms, and experts whose weights are not linear layers stay as they are.

    Raises:
        ConfigError: the model is not bfloat16, or its GPU has no fp8.
        UnsupportedModelError: it has no linear layer that could be fp8.
    """
    if model.dtype is not torch.bfloat16:
        raise ConfigError(
            f"engine.weights is fp8, which requires bfloat16, but the model is loaded as {model.dtype}. "
            "Set dtype: bfloat16, or engine.weights: native."
        )
    check_device(model.device)
    quantize = _quantizer_on(model.device)
    count = 0
    for parent in list(model.get_decoder().modules()):
        for name, child in list(parent.named_children()):
            if can_be_fp8(child):
                setattr(parent, name, Fp8Linear(child, quantize))
                count += 1
    if not count:
        raise UnsupportedModelError(
            f"engine.weights is fp8, but {type(model).__name__} has no linear layers with sides that are multiples of "
            f"{_SIDE_MULTIPLE}. Set engine.weights: native."
        )


def can_be_fp8(module: nn.Module) -> bool:
    """Whether a module is a linear layer that tensor cores can multiply in fp8."""
    if type(module) is not nn.Linear or is_absorbed(module):
        return False
    return not any(side % _SIDE_MULTIPLE for side in module.weight.shape)


def check_device(device: torch.device) -> None:
    """Raises :class:`ConfigError` for a GPU without fp8."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        raise ConfigError(
            f"engine.weights is fp8, which needs a GPU of compute capability {'.'.join(map(str, _MIN_CAPABILITY))} "
            f"(Ada, Hopper) or newer, but {torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}. "
            "Set engine.weights: native."
        )


def _quantizer_on(device: torch.device) -> RowQuantizer:
    if device.type == "cuda":
        try:
            from baton.engine.models.fp8_kernels import quantize_rows_by_kernel  # not every platform has triton
        except ImportError:
            return quantize_rows
        return quantize_rows_by_kernel
    return quantize_rows
