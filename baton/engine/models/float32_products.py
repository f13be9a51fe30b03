"""Products of bfloat16 by way of float32, where a CPU has no instructions for bfloat16.

Torch multiplies bfloat16 there several times as slowly as float32. What the fused decoder computes does not go this
way; drafts' prompts do, and prompts of models that are computed by their own modules.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

LEAST_ROWS = 16
"""For fewer, casting the weights takes as long as the product does."""
_LIMITS_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of oneDNN's ``ONEDNN_MAX_CPU_ISA``."""


def has_bfloat16(device: torch.device) -> bool:
    """Whether torch computes bfloat16 by instructions for it; without, it takes several times as long as float32.

    oneDNN, which multiplies for torch, may have been told to use fewer instructions than the CPU has.
    """
    if device.type != "cpu":
        return True
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _LIMITS_WITHOUT_BFLOAT16:
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def speed_up_products(network: nn.Module, device: torch.device) -> None:
    """Where it is faster, linear layers cast many rows of bfloat16, and their weights, and round behind the product.

    Harmless when that has been done; layers of other dtypes and fewer rows are computed as ever. Such layers refer to
    themselves, so a network that nobody needs any more is freed by the garbage collector alone.
    """
    if has_bfloat16(device):
        return
    for module in network.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_multiply, module)  # type: ignore[method-assign]


def _multiply(module: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    weight, bias = module.weight, module.bias
    if not states.dtype == weight.dtype == torch.bfloat16 or states.shape[:-1].numel() < LEAST_ROWS:
        return linear(states, weight, bias)
    product = linear(states.float(), weight.float(), None if bias is None else bias.float())
    return product.to(states.dtype)
