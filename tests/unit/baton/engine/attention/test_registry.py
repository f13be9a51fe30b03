"""The registry of attention backends: names, and errors for backends that cannot run."""

from __future__ import annotations

import sys
from typing import get_args

import pytest
import torch

from baton.core.errors import ConfigError
from baton.core.kv_spec import KVCacheSpec, LayerSpec
from baton.engine.attention import backends as registry
from baton.engine.attention.backends import create_backend
from baton.engine.attention.torch_sdpa import TorchSDPA
from baton.engine.kv_cache.paged_cache import PagedKVCache
from cluster.config.worker_config import EngineConfig
from tests.interpreted_triton import interpreted_triton


@pytest.fixture
def cache() -> PagedKVCache:
    return PagedKVCache(KVCacheSpec("model", "float32", 4, (LayerSpec(1, 8, 8),)), 4, torch.device("cpu"))


@pytest.fixture
def cuda_cache(cache: PagedKVCache) -> PagedKVCache:
    """Says that it lies on a GPU."""
    cache.device = torch.device("cuda")
    return cache


def test_the_configuration_knows_the_same_names() -> None:
    assert {*get_args(EngineConfig.model_fields["attention_backend"].annotation)} == {"auto", *registry._BACKENDS}


def test_auto_selects_gather_on_the_cpu(cache: PagedKVCache) -> None:
    assert isinstance(create_backend("auto", cache), TorchSDPA)


@pytest.mark.parametrize(("reason", "name"), [(None, "triton_paged"), ("no C compiler", "torch_sdpa")])
def test_auto_selects_triton_on_cuda_if_a_kernel_runs(
    cuda_cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch, reason: str | None, name: str
) -> None:
    chosen: list[str] = []
    for known in list(registry._BACKENDS):
        monkeypatch.setitem(registry._BACKENDS, known, lambda _, known=known: chosen.append(known))
    monkeypatch.setattr(registry, "_why_no_triton", lambda device: reason)
    create_backend("auto", cuda_cache)
    assert chosen == [name]


@pytest.fixture
def failing_probe(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The probe raises the error in the list."""
    errors: list[BaseException] = [RuntimeError("Failed to find C compiler. Please specify via CC")]

    def run_probe(device: torch.device) -> None:
        raise errors[0]

    monkeypatch.setattr("baton.engine.attention.triton_probe.run_probe", run_probe)
    return errors


def test_auto_explains_why_triton_is_not_used_and_what_to_install(
    cuda_cache: PagedKVCache, failing_probe: list[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(create_backend("auto", cuda_cache), TorchSDPA)
    assert "RuntimeError: Failed to find C compiler" in caplog.text
    assert "apt-get install gcc python3-dev" in caplog.text


def test_explicit_triton_that_cannot_run_is_refused(
    cuda_cache: PagedKVCache, failing_probe: list[BaseException]
) -> None:
    with pytest.raises(ConfigError, match=r"Failed to find C compiler.*gcc python3-dev.* Or set .*torch_sdpa"):
        create_backend("triton_paged", cuda_cache)


def test_a_gpu_fault_is_not_mistaken_for_missing_triton(
    cuda_cache: PagedKVCache, failing_probe: list[BaseException]
) -> None:
    failing_probe[0] = torch.AcceleratorError("an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError):
        create_backend("auto", cuda_cache)


def test_the_probe_fails_without_a_gpu_and_passes_in_the_interpreter() -> None:
    cpu = torch.device("cpu")
    if not torch.cuda.is_available():
        assert registry._why_no_triton(cpu)
    with interpreted_triton():
        assert registry._why_no_triton(cpu) is None


def test_an_unknown_name_is_refused(cache: PagedKVCache) -> None:
    with pytest.raises(ConfigError, match=r"'flash'.* auto, torch_sdpa, triton_paged\."):
        create_backend("flash", cache)


def test_triton_on_the_cpu_is_refused_unless_it_is_interpreted(cache: PagedKVCache) -> None:
    with pytest.raises(ConfigError, match="runs on CUDA, but this worker computes on cpu"):
        create_backend("triton_paged", cache)
    with interpreted_triton():
        from baton.engine.attention.triton_paged import TritonPaged

        assert isinstance(create_backend("triton_paged", cache), TritonPaged)
    with pytest.raises(ConfigError, match="runs on CUDA"):
        create_backend("triton_paged", cache)


def test_the_error_names_missing_triton(cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "baton.engine.attention.triton_paged", raising=False)
    monkeypatch.setitem(sys.modules, "baton.engine.attention.triton_kernels", None)
    with pytest.raises(ConfigError, match=r"triton cannot be imported.*baton-serve\[gpu\]"):
        create_backend("triton_paged", cache)
