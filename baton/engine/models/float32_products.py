"""Computes bfloat16 products in float32 on CPUs without bfloat16 instructions.

There, torch multiplies bfloat16 several times as slowly as float32. The fused decoder does not use this module; prompts
of drafts and of models that are computed by their own modules do.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

LEAST_ROWS = 16
"""With fewer rows, casting the weights takes as long as the product."""
_LIMITS_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of oneDNN's ``ONEDNN_MAX_CPU_ISA``."""


def has_bfloat16(device: torch.device) -> bool:
    """Whether torch has instructions for bfloat16; without them it is several times as slow as float32.

    ``ONEDNN_MAX_CPU_ISA`` can restrict oneDNN, which multiplies for torch, to fewer instructions than the CPU has.
    """
    if device.type != "cpu":
        return True
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _LIMITS_WITHOUT_BFLOAT16:
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def speed_up_products(network: nn.Module, device: torch.device) -> None:
    """Makes linear layers cast many bfloat16 rows, and their weights, and round after the product, where it is faster.

    Idempotent; layers of other dtypes and fewer rows are computed as before. Such layers refer to themselves, so only
    the garbage collector frees an unused network.
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
