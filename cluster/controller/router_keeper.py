"""Keeps a router running: starts it or takes it over, tells it of the workers, and replaces it when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.core.errors import BatonError
from baton.process.worker_environment import carried_variables
from cluster.actors import RouterActor
from cluster.config.config import BatonConfig
from cluster.controller.survivors import FoundRouter, Kind, survival_options
from cluster.registry.workers import WorkerInfo

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_RESTARTS = 5
"""Attempts to replace a router that died; its port may take a moment to become free."""
_RESTART_PAUSE_S = 1.0


class RouterKeeper:
    """Owns a router on this node. Must be used by the controller actor.

    Args:
        workers: the present workers by id, for a router that starts.
        report: passes a line of progress to the user.
        index: number of the router, if there are several.
        started: called when a router has come.

    Attributes:
        num_restarts: how often the router was replaced.
        router: handle of its actor; ``None`` while there is none.
        port: of the endpoint; 0 means any free one until the router has started.
    """

    def __init__(
        self,
        config: BatonConfig,
        secret: bytes,
        workers: Mapping[str, WorkerInfo],
        report: Callable[[str], None],
        index: int,
        started: Callable[[], None],
    ) -> None:
        self.num_restarts = 0
        self.index = index
        self.router: Any = None
        self.port = config.router.port
        self._started = started
        self._config = config
        self._secret = secret
        self._workers = workers
        self._report = report

    async def start(self) -> str:
        """Starts the router; returns the endpoint's URL.

        Raises:
            BatonError: it cannot start; the message says why.
        """
        # On this node, because the endpoint must be where the user started the cluster, and keep its port.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor_class: Any = ray.remote(RouterActor).options(
            num_cpus=0,
            max_concurrency=1000,
            scheduling_strategy=here,
            **survival_options(self._config.ray, Kind.ROUTER),
        )
        handle = ray.get_runtime_context().current_actor
        router = actor_class.remote(
            self._config.to_dict(), self.port, handle, self._secret, carried_variables(), self.index
        )
        try:
            endpoint, self.port = await _answer(router.start.remote())
        except (BatonError, RayTaskError):
            ray.kill(router, no_restart=True)
            raise
        # Without awaiting between, so that later changes of workers cannot overtake these calls.
        self.router = router
        self._started()
        known = [router.add_worker.remote(info.to_dict()) for info in self._workers.values()]
        await asyncio.gather(*known, return_exceptions=True)
        return str(endpoint)

    async def take_over(self, found: FoundRouter) -> str:
        """Makes a router that has lost its controller obey this one, or replaces it; returns the endpoint's URL."""
        self.port, self.router = found.port, found.actor
        handle = ray.get_runtime_context().current_actor
        try:
            await found.actor.follow.remote(handle, [info.to_dict() for info in self._workers.values()])
        except RayError as error:
            logger.error("the router cannot be taken over and is replaced: %s", error)
            self.router = None
            ray.kill(found.actor, no_restart=True)
            return await self._replace()
        self._started()
        await self.reload(self._config)
        return found.endpoint

    async def reload(self, config: BatonConfig) -> None:
        """Gives the router the API keys and SLO classes of ``config``, and to those that replace it.

        Raises:
            BatonError: they cannot be used, and nothing has changed.
        """
        if self.router is not None:
            try:
                await _answer(self.router.reload.remote(config.to_dict()))
            except RayActorError:
                logger.warning("the router died before it reloaded; the next one starts with this configuration")
        self._config = config

    async def check_model(self, config: BatonConfig) -> None:
        """Raises :class:`ConfigError` if the router cannot serve the model of ``config``: see ``RouterHost``."""
        if self.router is not None:
            await _answer(self.router.check_model.remote(config.to_dict()))

    async def tell(self, method: str, *arguments: Any) -> None:
        """Calls ``add_worker``, ``drain_worker`` or ``remove_worker`` of the router, if there is one."""
        if self.router is None:
            return
        try:
            await getattr(self.router, method).remote(*arguments)
        except RayError as error:
            logger.warning("the router did not accept %s: %s", method, error)

    async def watch(self) -> None:
        """Replaces a router that died, on the same port and with the existing workers, until cancelled.

        Raises:
            BatonError, RayError: it cannot be replaced.
        """
        while True:
            router = self.router
            try:
                await router.wait.remote()
                return
            except RayError as error:
                logger.error("the router died and is being replaced: %s", error)
                self._report("the router is lost, and its open streams have broken off; starting another one")
                self.num_restarts += 1
            died_s = time.monotonic()
            self.router = None
            ray.kill(router, no_restart=True)  # it may have failed without dying
            endpoint = await self._replace()
            self._report(f"the router serves again at {endpoint}, after {time.monotonic() - died_s:.1f} s")

    async def stop(self) -> None:
        """Stops the router; running requests end with an error."""
        router, self.router = self.router, None
        if router is None:
            return
        try:
            await asyncio.wait_for(asyncio.ensure_future(router.stop.remote()), _STOP_TIMEOUT_S)
        except (RayError, TimeoutError):
            logger.info("the router did not stop by itself")
        ray.kill(router, no_restart=True)

    async def _replace(self) -> str:
        for _ in range(_RESTARTS - 1):
            try:
                return await self.start()
            except (BatonError, RayError) as error:
                logger.warning("the router could not be started again: %s", error)
                await asyncio.sleep(_RESTART_PAUSE_S)
        return await self.start()


async def _answer(call: Any) -> Any:
    """The result of an actor call; a ``BatonError`` of the actor is raised as such."""
    try:
        return await call
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, BatonError) else error from None
