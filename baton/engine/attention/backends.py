"""The registry of attention backends."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from baton.core.errors import ConfigError
from baton.engine.attention.base import AttentionBackend
from baton.engine.attention.torch_sdpa import TorchSDPA
from baton.engine.device.device_errors import is_device_lost, is_out_of_memory
from baton.engine.kv_cache.paged_cache import PagedKVCache

logger = logging.getLogger(__name__)

_TRITON_NEEDS = (
    "Triton compiles kernels when they are first launched. It needs the package triton (pip install "
    "'baton-serve[gpu]'), a C compiler (gcc or clang in PATH, or named by CC) and Python's header files (on Debian and "
    "Ubuntu: apt-get install gcc python3-dev)."
)


def _triton_paged(cache: PagedKVCache) -> AttentionBackend:
    try:
        from baton.engine.attention.triton_paged import TritonPaged, is_interpreted  # not every platform has triton
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
    if cache.device.type == "cuda" and (reason := _why_no_triton(cache.device)) is not None:
        raise ConfigError(
            f"engine.attention_backend is 'triton_paged', but Triton cannot run a kernel here ({reason}). "
            f"{_TRITON_NEEDS} Or set engine.attention_backend to auto or torch_sdpa."
        )
    return TritonPaged(cache)


_BACKENDS: dict[str, Callable[[PagedKVCache], AttentionBackend]] = {
    "torch_sdpa": TorchSDPA,
    "triton_paged": _triton_paged,
}


def create_backend(name: str, cache: PagedKVCache) -> AttentionBackend:
    """Creates a backend. ``auto`` takes the best one for the cache's device, and warns when a GPU cannot run it.

    Raises:
        ConfigError: the name is unknown, or the backend cannot run here.
    """
    if name == "auto":
        name = _best_for(cache.device)
    if name not in _BACKENDS:
        raise ConfigError(
            f"engine.attention_backend is {name!r}, but the known backends are: auto, {', '.join(sorted(_BACKENDS))}."
        )
    return _BACKENDS[name](cache)


def _best_for(device: torch.device) -> str:
    if device.type != "cuda":
        return "torch_sdpa"
    reason = _why_no_triton(device)
    if reason is None:
        return "triton_paged"
    logger.warning(
        "attention uses torch_sdpa, which is slower and does not support CUDA graphs, because Triton cannot run a "
        "kernel here (%s). %s",
        reason,
        _TRITON_NEEDS,
    )
    return "torch_sdpa"


def _why_no_triton(device: torch.device) -> str | None:
    """The reason why Triton cannot compile and launch a kernel on a GPU; ``None`` when it can.

    Raises:
        Exception: the GPU itself failed, or its memory is full.
    """
    try:
        from baton.engine.attention.triton_probe import run_probe  # not every platform has triton

        run_probe(device)
    except Exception as error:
        if is_out_of_memory(error) or is_device_lost(error):
            raise
        return f"{type(error).__name__}: {error}"
    return None
