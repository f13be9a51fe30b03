"""Models of random weights in the shape of real ones, and caches of random keys and values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from baton.engine.kv_cache.paged_cache import PagedKVCache
from benchmarks.device_run.part import SHAPES

DTYPES = {"llama-3.1-8b": "bfloat16", "small": "float32", "tiny": "float32"}
"""The dtype in which each shape is computed."""


def make_model(shape: str, device: torch.device) -> Any:
    """Random weights, the same ones each time on the same device."""
    dtype = getattr(torch, DTYPES[shape])
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=dtype)
    return model.to(dtype).eval()


def fill_randomly(cache: PagedKVCache) -> None:
    """Zeros can be read and multiplied faster than data, and hide what was never written. Not for int8 caches."""
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
