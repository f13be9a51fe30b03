"""The routers of a cluster. They share one endpoint, and any of them serves any request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.process.listening import listen
from cluster.config.config import BatonConfig
from cluster.controller.router_keeper import RouterKeeper
from cluster.controller.survivors import FoundRouter
from cluster.registry.workers import WorkerInfo


class RouterGroup:
    """Owns ``router.replicas`` routers on this node. Must be used by the controller actor.

    Args:
        workers: the present workers by id, for routers that start.
        report: passes a line of progress to the user.
    """

    def __init__(
        self, config: BatonConfig, secret: bytes, workers: Mapping[str, WorkerInfo], report: Callable[[str], None]
    ) -> None:
        self._config = config
        self._keepers = [
            RouterKeeper(config, secret, workers, report, index, self._introduce)
            for index in range(config.router.replicas)
        ]

    @property
    def num_restarts(self) -> int:
        """How often a router was replaced."""
        return sum(keeper.num_restarts for keeper in self._keepers)

    async def start(self) -> str:
        """Starts the routers; returns the endpoint's URL.

        Raises:
            BatonError: one cannot start; the message says why.
        """
        first, *others = self._keepers
        if others:  # routers of another cluster could share the port, too
            listen(self._config.router.host, self._config.router.port).close()
        endpoint = await first.start()
        await self._start(others, first.port)
        return endpoint

    async def take_over(self, found: Sequence[FoundRouter]) -> str:
        """Makes routers that have lost their controller obey this one, and starts those that are missing.

        Returns:
            The endpoint's URL.
        """
        known = {router.index: router for router in found}
        kept = [keeper for keeper in self._keepers if keeper.index in known]
        endpoints = await asyncio.gather(*(keeper.take_over(known[keeper.index]) for keeper in kept))
        await self._start([keeper for keeper in self._keepers if keeper not in kept], found[0].port)
        return endpoints[0]

    async def reload(self, config: BatonConfig) -> None:
        """Gives the routers the API keys and SLO classes of ``config``, and to those that replace them.

        Raises:
            BatonError: they cannot be used. The first router finds that out, and nothing has changed; if another one
                does, because a file has changed meanwhile, reload again.
        """
        for keeper in self._keepers:
            await keeper.reload(config)

    async def check_model(self, config: BatonConfig) -> None:
        """Raises :class:`ConfigError` if the routers cannot serve the model of ``config``: see ``RouterHost``."""
        await self._keepers[0].check_model(config)

    async def tell(self, method: str, *arguments: Any) -> None:
        """Calls ``add_worker``, ``drain_worker`` or ``remove_worker`` of every router."""
        await asyncio.gather(*(keeper.tell(method, *arguments) for keeper in self._keepers))

    async def watch(self) -> None:
        """Replaces routers that die, on the same port and with the existing workers, until cancelled.

        Raises:
            BatonError, RayError: one cannot be replaced.
        """
        await asyncio.gather(*(keeper.watch() for keeper in self._keepers))

    async def stop(self) -> None:
        """Stops the routers; running requests end with an error."""
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers))

    async def _start(self, keepers: Sequence[RouterKeeper], port: int) -> None:
        for keeper in keepers:
            keeper.port = port
        await asyncio.gather(*(keeper.start() for keeper in keepers))

    def _introduce(self) -> None:
        """Tells every router of the others, whenever one has come."""
        routers = {keeper.index: keeper.router for keeper in self._keepers if keeper.router is not None}
        if len(self._keepers) > 1:
            for router in routers.values():
                router.meet.remote(routers)
