"""A cache in which nothing is a number: whoever reads what nobody wrote finds out."""

from __future__ import annotations

import torch

from engine.kv_cache import PagedKVCache
from engine.kv_int8 import scales_of_rows


def spoil(cache: PagedKVCache) -> None:
    """Whatever its encoding is."""
    for tensor in (*cache.keys, *cache.values):
        (scales_of_rows(tensor) if tensor.dtype == torch.int8 else tensor).fill_(torch.nan)
