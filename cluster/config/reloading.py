"""Which changes of the configuration a running cluster takes over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cluster.config.config import BatonConfig

_RELOADED = ("router.api_keys", "slo")
"""Keys whose values are read again; changes of others need a restart."""


def reloaded(running: BatonConfig, new: BatonConfig) -> BatonConfig:
    """The running configuration with the API keys and SLO classes of the new one."""
    router = running.router.model_copy(update={"api_keys": new.router.api_keys})
    return running.model_copy(update={"router": router, "slo": new.slo})


def restart_keys(running: BatonConfig, new: BatonConfig) -> list[str]:
    """The dotted keys that differ and need a restart."""
    before, after = dict(_flat(running.to_dict())), dict(_flat(new.to_dict()))
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return sorted(key for key in changed if not f"{key}.".startswith(tuple(f"{name}." for name in _RELOADED)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
