"""Decodes int8 and int4 weights number by number."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from baton.engine.cpu.quantization import quantize_linear, quantize_linear_int4
from baton.engine.cpu.structure import Linear
from baton.engine.models.model_loader import LoadedModel, prepare_model


def numbers_of(linear: Linear, num_rows: int, width: int) -> torch.Tensor:
    """The decoded weights, float32 ``[num_rows, width]``."""
    assert linear.scales is not None
    if linear.weight.dtype is torch.int8:
        return linear.weight * linear.scales[:, None]
    words = linear.weight.to(torch.int32) & 0xFFFF
    levels = torch.stack([words >> 4 * row & 15 for row in range(4)], dim=3).flatten(2, 3)
    steps, least = linear.scales.double().unbind(2)
    worth = levels * steps[..., None] + least[..., None]
    return worth.transpose(1, 2).flatten(2).flatten(0, 1)[:num_rows, :width].float()


def rounded(weight: torch.Tensor, weights: str) -> torch.Tensor:
    """A weight rounded to the format ``weights``, in float32."""
    quantize = quantize_linear_int4 if weights == "int4" else quantize_linear
    return numbers_of(quantize(Linear(weight.detach(), None)), *weight.shape)


def with_rounded_weights(loaded: LoadedModel, weights: str) -> LoadedModel:
    """The model with rounded weights in float32; an embedding that shares the head's weights is not rounded."""
    model: Any = deepcopy(loaded.model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(rounded(module.weight, "int8" if name == "lm_head" else weights))
    return prepare_model(model, "float32")
