"""Names of the attention backends. Registration is this table, nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from engine.attention.base import AttentionBackend
from engine.attention.torch_sdpa import TorchSDPA
from engine.errors import ConfigError
from engine.kv_cache import PagedKVCache


def _triton_paged(cache: PagedKVCache) -> AttentionBackend:
    try:
        from engine.attention.triton_paged import TritonPaged, is_interpreted  # not every platform has triton
    except ImportError as error:
        raise ConfigError(
            f"engine.attention_backend is 'triton_paged', but triton cannot be imported ({error}). Install "
            "baton-serve[gpu], or set engine.attention_backend to auto or torch_sdpa."
        ) from error
    if cache.device.type != "cuda" and not is_interpreted():
        raise ConfigError(
            f"engine.attention_backend is 'triton_paged', which runs on CUDA, but this worker computes on "
            f"{cache.device.type}. Set engine.attention_backend to auto or torch_sdpa; for tests of the kernels "
            "themselves, TRITON_INTERPRET=1 in the worker's environment runs them on the CPU, very slowly."
        )
    return TritonPaged(cache)


_BACKENDS: dict[str, Callable[[PagedKVCache], AttentionBackend]] = {
    "torch_sdpa": TorchSDPA,
    "triton_paged": _triton_paged,
}


def create_backend(name: str, cache: PagedKVCache) -> AttentionBackend:
    """``auto`` takes the best one for the cache's device.

    Raises:
        ConfigError: the name is unknown, or the backend cannot run here.
    """
    if name == "auto":
        name = "triton_paged" if cache.device.type == "cuda" and _has_triton() else "torch_sdpa"
    if name not in _BACKENDS:
        raise ConfigError(
            f"engine.attention_backend is {name!r}, but the known backends are: auto, {', '.join(sorted(_BACKENDS))}."
        )
    return _BACKENDS[name](cache)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
