"""Routers and workers that outlive their controller: how they are named, found, taken over and ended.

Their actors are detached; Ray's list of named actors is what finds them.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ray
from ray.exceptions import RayError

from baton.core.errors import ConfigError
from baton.core.roles import POOLS
from baton.rpc.credentials import create_secret
from cluster.config.config import BatonConfig, RayConfig
from cluster.config.key_changes import worker_keys
from cluster.config.reloading import restart_keys
from cluster.controller.ray_errors import logged
from cluster.registry.workers import WorkerInfo

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_STOP_S = 15.0
_POLL_S = 0.1
_FREE_KEYS = frozenset({"prefill.workers", "decode.workers"})
"""Keys with which a cluster may be taken over although they differ; those that reload are free as well."""


class Kind(StrEnum):
    """The kinds of actors; the values begin their names."""

    ROUTER = "baton-router-"
    WORKER = "baton-worker-"


def survival_options(config: RayConfig, kind: Kind) -> dict[str, Any]:
    """The options of an actor that shall outlive its controller."""
    return {"name": kind + secrets.token_hex(4), "namespace": config.namespace, "lifetime": "detached"}


@dataclass(frozen=True, slots=True)
class FoundRouter:
    """A router without a controller."""

    actor: Any
    endpoint: str
    port: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker without a controller that is ready, and the configuration with which it was started."""

    actor: Any
    info: WorkerInfo
    config: BatonConfig


@dataclass(frozen=True, slots=True)
class Survivors:
    """What an earlier controller has left.

    Attributes:
        secret: the secret of that cluster.
    """

    secret: bytes
    routers: tuple[FoundRouter, ...]
    workers: tuple[FoundWorker, ...]

    def of_pool(self, pool: str) -> list[FoundWorker]:
        """The workers of a pool, in the order in which they were started."""
        found = [worker for worker in self.workers if worker.info.pool == pool]
        return sorted(found, key=lambda worker: worker_number(worker.info.worker_id))


def worker_number(worker_id: str) -> int:
    """The number in a worker's id: 3 of ``decode-3``."""
    return int(worker_id.rpartition("-")[2])


def find_survivors(config: BatonConfig) -> Survivors | None:
    """What can be taken over; ends processes that are not ready. Returns ``None`` if no process is left.

    Raises:
        ConfigError: what is there has another configuration; nothing has changed.
    """
    routers, workers, unready, secret = [], [], [], b""
    found = _describe(config.ray.namespace)
    first = min((described["index"] for kind, _, described in found if kind is Kind.ROUTER and described), default=None)
    for kind, actor, described in found:
        if described:
            # An upgrade replaces the workers, then reloads the routers, the first one first. If it was interrupted,
            # processes after the last that it reached have other settings for workers than the first router has.
            is_replaceable = first is not None and (kind is Kind.WORKER or described["index"] != first)
            check_configuration(BatonConfig.from_dict(described["config"]), config, is_replaceable=is_replaceable)
        if kind is Kind.ROUTER and described.get("endpoint"):
            routers.append(FoundRouter(actor, described["endpoint"], described["port"], described["index"]))
        elif kind is Kind.WORKER and described.get("info"):
            info, with_config = WorkerInfo.from_dict(described["info"]), BatonConfig.from_dict(described["config"])
            workers.append(FoundWorker(actor, info, with_config))
        else:
            unready.append(actor)
            continue
        secret = described["secret"]
    for actor in unready:
        ray.kill(actor, no_restart=True)
    return Survivors(secret or create_secret(), tuple(routers), tuple(workers)) if found else None


def end_survivors(namespace: str) -> int:
    """Ends all routers, then all workers of a namespace; returns how many there were."""
    found = list(_actors(namespace))
    for kind in Kind:
        actors = [actor for other, actor in found if other is kind]
        stops = [actor.stop.remote() for actor in actors]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=_STOP_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)
    give_up_at = time.monotonic() + _STOP_S
    while any(_actors(namespace)) and time.monotonic() < give_up_at:  # a call that was not sent yet would be lost
        time.sleep(_POLL_S)
    return len(found)


def _describe(namespace: str) -> list[tuple[Kind, Any, dict[str, Any]]]:
    """(kind, handle, description) of all processes; those that do not answer have an empty description."""
    asked = [(kind, actor, actor.describe.remote()) for kind, actor in _actors(namespace)]
    answers = [answer for _, _, answer in asked]
    done = set(ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_S)[0]) if answers else set()
    return [(kind, actor, _result(answer) if answer in done else {}) for kind, actor, answer in asked]


def _result(answer: Any) -> dict[str, Any]:
    try:
        return dict(ray.get(answer))
    except RayError as error:
        logger.warning("a process of an earlier controller does not answer and is ended: %s", logged(error))
        return {}


def _actors(namespace: str) -> Iterator[tuple[Kind, Any]]:
    for named in ray.util.list_named_actors(all_namespaces=True):
        kind = next((kind for kind in Kind if named["name"].startswith(kind)), None)
        if kind is None or named["namespace"] != namespace:
            continue
        try:
            yield kind, ray.get_actor(named["name"], namespace=namespace)
        except ValueError:  # it has ended since
            continue


def check_configuration(running: BatonConfig, wanted: BatonConfig, *, is_replaceable: bool = False) -> None:
    """Raises :class:`ConfigError` if a cluster with one configuration cannot be taken over with the other.

    Args:
        is_replaceable: whether settings of workers may differ, since an upgrade was interrupted.
    """
    free = _FREE_KEYS.union(worker_keys(running, wanted, *POOLS) if is_replaceable else ())
    keys = [key for key in restart_keys(running, wanted) if key not in free]
    if keys:
        raise ConfigError(
            f"Router and workers of an earlier `baton up` still serve in the Ray namespace {wanted.ray.namespace!r}, "
            f"with another configuration: {', '.join(keys)}. Start with that one to take them over, or end them "
            "with `baton down` first."
        )
