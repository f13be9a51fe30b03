"""Ends a router or worker that has outlived its controller for too long.

On a Ray cluster that `baton up` has not started, routers and workers serve without a controller until the next one
takes them over. This watch is what ends them if there is none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from cluster.config.config import RayConfig

logger = logging.getLogger(__name__)

CONTROLLER_NAME = "baton-controller"
_LOOK_EVERY_S = 5.0
_ANSWER_S = 10.0
_STOP_TIMEOUT_S = 15.0


class OrphanWatch:
    """Looks for the controller.

    Args:
        timeout_s: how long there may be no controller.
        has_controller: whether there is one; ``None`` if that is unknown.
    """

    def __init__(
        self,
        timeout_s: float,
        has_controller: Callable[[], bool | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._has_controller = has_controller
        self._clock = clock
        self._alone_since_s: float | None = None

    def is_orphaned(self) -> bool:
        """Looks once. Returns whether the time is over."""
        found = self._has_controller()
        if found is None:
            return False
        if found:
            if self._alone_since_s is not None:
                logger.warning("there is a controller again")
            self._alone_since_s = None
            return False
        if self._alone_since_s is None:
            self._alone_since_s = self._clock()
            logger.warning(
                "the controller is lost; this process goes on and ends in %g s, unless `baton up` takes it over",
                self._timeout_s,
            )
        return self._clock() - self._alone_since_s >= self._timeout_s


def end_without_controller(config: RayConfig) -> None:
    """Lets this actor end by itself where it outlives its controller. Call it in the actor's constructor."""
    if config.is_local:
        return
    actor = ray.get_runtime_context().current_actor
    watch = OrphanWatch(config.orphan_timeout_s, lambda: _has_controller(config.namespace))
    # A thread of its own, since the actor may be busy or never be started.
    threading.Thread(target=_run, args=(watch, actor), name="orphan-watch", daemon=True).start()


def _run(watch: OrphanWatch, actor: Any) -> None:
    while not watch.is_orphaned():
        time.sleep(_LOOK_EVERY_S)
    logger.error("no controller has come back; this process ends")
    try:
        ray.get(actor.stop.remote(), timeout=_STOP_TIMEOUT_S)
    except RayError as error:
        logger.warning("the process did not stop by itself: %s", error)
    ray.kill(actor, no_restart=True)


def _has_controller(namespace: str) -> bool | None:
    try:
        controller: Any = ray.get_actor(CONTROLLER_NAME, namespace=namespace)
        ray.get(controller.__ray_ready__.remote(), timeout=_ANSWER_S)  # Ray may still list one that is dead
    except (ValueError, ActorDiedError):
        return False
    except Exception:  # Ray raises several classes while its head is away
        logger.debug("it is unknown whether there is a controller", exc_info=True)
        return None
    return True
