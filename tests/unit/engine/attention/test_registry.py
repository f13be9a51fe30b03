"""Which backend a name stands for, and what is said where it cannot run."""

from __future__ import annotations

import sys

import pytest
import torch

from engine.attention import registry
from engine.attention.registry import create_backend
from engine.attention.torch_sdpa import TorchSDPA
from engine.errors import ConfigError
from engine.kv_cache import PagedKVCache
from engine.kv_spec import KVCacheSpec, LayerSpec
from tests.interpreted_triton import interpreted_triton


@pytest.fixture
def cache() -> PagedKVCache:
    return PagedKVCache(KVCacheSpec("model", "float32", 4, (LayerSpec(1, 8, 8),)), 4, torch.device("cpu"))


@pytest.fixture
def cuda_cache(cache: PagedKVCache) -> PagedKVCache:
    """Says that it lies on a GPU."""
    cache.device = torch.device("cuda")
    return cache


def test_auto_gathers_on_the_cpu(cache: PagedKVCache) -> None:
    assert isinstance(create_backend("auto", cache), TorchSDPA)


@pytest.mark.parametrize(("has_triton", "name"), [(True, "triton_paged"), (False, "torch_sdpa")])
def test_auto_takes_triton_on_cuda_where_there_is_one(
    cuda_cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch, has_triton: bool, name: str
) -> None:
    chosen: list[str] = []
    for known in list(registry._BACKENDS):
        monkeypatch.setitem(registry._BACKENDS, known, lambda _, known=known: chosen.append(known))
    monkeypatch.setattr(registry, "_has_triton", lambda: has_triton)
    create_backend("auto", cuda_cache)
    assert chosen == [name]


def test_an_unknown_name_is_refused(cache: PagedKVCache) -> None:
    with pytest.raises(ConfigError, match=r"'flash'.* auto, torch_sdpa, triton_paged\."):
        create_backend("flash", cache)


def test_triton_on_the_cpu_is_refused_unless_it_is_interpreted(cache: PagedKVCache) -> None:
    with pytest.raises(ConfigError, match="runs on CUDA, but this worker computes on cpu"):
        create_backend("triton_paged", cache)
    with interpreted_triton():
        from engine.attention.triton_paged import TritonPaged

        assert isinstance(create_backend("triton_paged", cache), TritonPaged)
    with pytest.raises(ConfigError, match="runs on CUDA"):
        create_backend("triton_paged", cache)


def test_a_missing_triton_is_named(cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "engine.attention.triton_paged", raising=False)
    monkeypatch.setitem(sys.modules, "engine.attention.triton_kernels", None)
    with pytest.raises(ConfigError, match=r"triton cannot be imported.*baton-serve\[gpu\]"):
        create_backend("triton_paged", cache)
