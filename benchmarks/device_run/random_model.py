"""Models of random weights in the shape of real ones, and caches of random keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama  # noqa: F401 - imported once, before processes are forked

from engine.kv_cache import PagedKVCache

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}
DTYPES = {"llama-3.1-8b": "bfloat16", "tiny": "float32"}
"""In which each shape is computed."""


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
