"""Names of the attention backends. Registration is this table, nothing else."""

from __future__ import annotations

from collections.abc import Callable

from engine.attention.base import AttentionBackend
from engine.attention.torch_sdpa import TorchSDPA
from engine.errors import ConfigError
from engine.kv_cache import PagedKVCache

_BACKENDS: dict[str, Callable[[PagedKVCache], AttentionBackend]] = {"torch_sdpa": TorchSDPA}


def create_backend(name: str, cache: PagedKVCache) -> AttentionBackend:
    """Raises :class:`ConfigError` for an unknown name; ``auto`` takes the best one for the cache's device."""
    if name == "auto":
        name = "torch_sdpa"
    if name not in _BACKENDS:
        raise ConfigError(
            f"engine.attention_backend is {name!r}, but the known backends are: auto, {', '.join(sorted(_BACKENDS))}."
        )
    return _BACKENDS[name](cache)
