"""The ordering policies by name. A policy is registered by its entry in this table."""

from __future__ import annotations

from collections.abc import Callable

from baton.core.errors import ConfigError
from baton.engine.scheduling.ordering import ArrivalOrder, EarliestDeadlineFirst, OrderingPolicy

_POLICIES: dict[str, Callable[[], OrderingPolicy]] = {"edf": EarliestDeadlineFirst, "fcfs": ArrivalOrder}


def create_ordering(name: str) -> OrderingPolicy:
    """Creates an ordering policy. Raises :class:`ConfigError` for an unknown name."""
    if name not in _POLICIES:
        raise ConfigError(f"prefill.ordering is {name!r}, but the known policies are: {', '.join(sorted(_POLICIES))}.")
    return _POLICIES[name]()
