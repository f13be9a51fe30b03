"""What each key of the configuration needs to take effect in a running cluster.

``baton reload`` takes over the keys of :attr:`Need.RELOAD`; ``baton upgrade`` does what the others need, or refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from baton.core.errors import ConfigError
from baton.core.roles import DECODE, POOLS, PREFILL
from cluster.config.config import BatonConfig
from cluster.config.shown import shown_change


class Need(StrEnum):
    """What a change of a key needs."""

    RELOAD = "reload"
    """Routers take it over at once."""
    CONTROLLER = "controller"
    """Only the controller reads it, when it starts workers."""
    SIZE = "size"
    """The pool is scaled."""
    PREFILL = "prefill"
    """New prefill workers."""
    DECODE = "decode"
    """New decode workers."""
    WORKERS = "workers"
    """New workers of both pools."""
    ROUTER = "router"
    """A new router."""
    CLUSTER = "cluster"
    """Another cluster."""


_RULES: Mapping[str, Need] = {
    "model": Need.WORKERS,
    "served_model_name": Need.ROUTER,
    "dtype": Need.WORKERS,
    "max_model_len": Need.WORKERS,
    "router": Need.ROUTER,
    "router.api_keys": Need.RELOAD,
    "router.host": Need.CLUSTER,
    "router.port": Need.CLUSTER,
    "prefill": Need.PREFILL,
    "prefill.workers": Need.SIZE,
    "prefill.ordering": Need.ROUTER,  # the router predicts with it
    "decode": Need.DECODE,
    "decode.workers": Need.SIZE,
    "speculation": Need.DECODE,
    "speculation.draft": Need.WORKERS,
    "speculation.method": Need.WORKERS,  # draft: auto follows method and shadow
    "speculation.shadow": Need.WORKERS,
    "speculation.draft_on_prefill": Need.WORKERS,
    "engine": Need.WORKERS,
    "engine.block_size": Need.ROUTER,  # the router's prefix index counts in blocks
    "engine.prefix_caching": Need.ROUTER,
    "kv_transfer": Need.WORKERS,
    "kv_transfer.part_bytes": Need.CLUSTER,  # workers refuse messages that are larger than their own parts
    "security": Need.CLUSTER,
    "ray": Need.CLUSTER,
    "ray.start_timeout_s": Need.CONTROLLER,
    "network": Need.WORKERS,
    "liveness": Need.ROUTER,
    "log": Need.ROUTER,
    "telemetry": Need.ROUTER,
    "slo": Need.RELOAD,
    "routing": Need.ROUTER,
    "simulation": Need.CLUSTER,
    "admission": Need.ROUTER,
    "autoscaler": Need.ROUTER,
    "jobs": Need.ROUTER,
}
"""Keys and sections with their needs; the longest name that fits a key counts."""

_DOTTED_NAME = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")

_REPLACES: Mapping[str, frozenset[Need]] = {
    PREFILL: frozenset({Need.PREFILL, Need.WORKERS}),
    DECODE: frozenset({Need.DECODE, Need.WORKERS}),
}
_REFUSALS: Mapping[Need, str] = {
    Need.ROUTER: (
        "only a router that starts reads it, and a new router would break off the open streams. Restart the cluster "
        "with `baton down` and `baton up` when it is idle (`baton wait-idle`)"
    ),
    Need.CLUSTER: (
        "processes that differ in it cannot work together. Start another cluster with it, move the clients there, and "
        "end this one with `baton down`"
    ),
}


def need_of(key: str) -> Need:
    """What a change of the dotted key needs. Raises :class:`KeyError` for a key that no rule covers."""
    name = key
    while name not in _RULES:
        name, _, last = name.rpartition(".")
        if not last:
            raise KeyError(key)
    return _RULES[name]


def how_to_change(text: str) -> str:
    """A sentence on how to change the configuration's keys in a text, such as a hint; empty for a text without any."""
    known = dict(_flat(BatonConfig().to_dict()))
    found = [key for key in dict.fromkeys(_DOTTED_NAME.findall(text)) if key in known]
    refused = [key for key in found if need_of(key) in _REFUSALS]
    ways = {
        "`baton upgrade --set`, while the cluster runs": [key for key in found if key not in refused],
        "`baton down` and `baton up --set`, since `baton upgrade` refuses it": refused,
    }
    parts = [f"{', '.join(keys)}: {way}." for way, keys in ways.items() if keys]
    return f"To change {' '.join(parts)}" if parts else ""


def changed_keys(running: BatonConfig, new: BatonConfig) -> list[str]:
    """The dotted keys whose values differ."""
    return list(_changes(running, new))


def worker_keys(running: BatonConfig, new: BatonConfig, *pools: str) -> list[str]:
    """The keys that differ and for which workers of one of these pools are replaced."""
    if running is new:
        return []
    needs = frozenset[Need]().union(*(_REPLACES[pool] for pool in pools))
    return [key for key in changed_keys(running, new) if need_of(key) in needs]


def _changes(running: BatonConfig, new: BatonConfig) -> dict[str, str]:
    """The dotted keys whose values differ, in order, and how, without secrets."""
    before, after = dict(_flat(running.to_dict())), dict(_flat(new.to_dict()))
    return {
        key: shown_change(before.get(key), after.get(key))
        for key in sorted({**before, **after})
        if before.get(key) != after.get(key)
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@dataclass(frozen=True, slots=True)
class UpgradePlan:
    """What an upgrade from one configuration to another does.

    Attributes:
        workers: the keys because of which workers are replaced, by pool; empty for a pool that is not touched.
        sizes: new sizes of pools.
        at_once: the other keys, which take effect without a replacement.
        values: the old and the new value of each key that differs, without secrets.
    """

    workers: Mapping[str, Sequence[str]]
    sizes: Mapping[str, int]
    at_once: Sequence[str]
    values: Mapping[str, str]

    @property
    def changes(self) -> bool:
        """Whether anything differs."""
        return bool(self.values)

    def texts(self) -> list[str]:
        """What is done, and why, in lines."""
        if not self.changes:
            return ["Nothing differs from the running configuration."]
        lines = [f"{key}: {change}" for key, change in self.values.items()]
        for pool, keys in self.workers.items():
            what = f"every worker is replaced, because of {', '.join(keys)}" if keys else "workers are not touched"
            size = f"; scaled to {self.sizes[pool]}" if pool in self.sizes else ""
            lines.append(f"{pool}: {what}{size}")
        return lines + ([f"at once: {', '.join(self.at_once)}"] if self.at_once else [])


def plan_upgrade(running: BatonConfig, new: BatonConfig) -> UpgradePlan:
    """Plans how a running cluster gets another configuration.

    Raises:
        ConfigError: a key has changed that a running cluster cannot take over; the message names all of them.
    """
    values = _changes(running, new)
    needs = {key: need_of(key) for key in values}
    refused = [f"{key}: {values[key]}; {_REFUSALS[need]}." for key, need in needs.items() if need in _REFUSALS]
    if refused:
        raise ConfigError("\n".join(["The running cluster cannot take over these changes:", *refused]))
    workers = {pool: [key for key, need in needs.items() if need in _REPLACES[pool]] for pool in POOLS}
    sizes = {pool: new.pool(pool).workers for pool in POOLS if f"{pool}.workers" in needs}
    at_once = [key for key, need in needs.items() if need in (Need.RELOAD, Need.CONTROLLER)]
    return UpgradePlan(workers, sizes, at_once, values)
