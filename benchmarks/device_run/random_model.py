"""Models with random weights in the shape of real models, and caches with random keys and values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from baton.engine.kv_cache.paged_cache import PagedKVCache
from benchmarks.device_run.part import SHAPES

DTYPES = {"llama-3.1-8b": "bfloat16", "small": "float32", "tiny": "float32"}
"""The dtype of each shape."""


def make_model(shape: str, device: torch.device) -> Any:
    """A model with random weights, which are the same in each call on the same device."""
    dtype = getattr(torch, DTYPES[shape])
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=dtype)
    return model.to(dtype).eval()


def fill_randomly(cache: PagedKVCache) -> None:
    """Fills a cache that is not int8 with random data: zeros may be faster, and would hide missing writes."""
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
