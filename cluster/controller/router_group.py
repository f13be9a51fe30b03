"""The routers of a cluster. They share one endpoint, and any of them serves any request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.core.errors import BatonError, WorkerLostError
from baton.process.background import race
from baton.process.ending import end_process
from baton.process.listening import listen
from baton.process.worker_environment import carried_variables
from cluster.actors import RouterActor
from cluster.config.config import BatonConfig
from cluster.controller.ray_errors import has_failed_to_begin, logged, short_reason
from cluster.controller.router_pulse import RouterPulse
from cluster.controller.survivors import FoundRouter, Kind, survival_options
from cluster.registry.progress_judge import Standing
from cluster.registry.progress_watch import ProgressWatch
from cluster.registry.workers import WorkerInfo

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_ANSWER_S = 10.0
_RESTARTS = 5
"""Attempts to start a router. Its port may take a moment to become free when it replaces one that died."""
_RESTART_PAUSE_S = 1.0


class _LostInStartError(WorkerLostError):
    """The process of a router has ended before it served."""


@dataclass(slots=True)
class _Place:
    """The place of one router.

    Attributes:
        index: number of the router, from 0.
        actor: its handle; ``None`` while there is none.
        hangs: set when the router is judged as lost although its process may live.
        reason: why it is.
    """

    index: int
    actor: Any = None
    hangs: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    @property
    def name(self) -> str:
        return f"router-{self.index}"

    async def run(self) -> None:
        """Returns when the router has stopped. Raises ``RayError`` or :class:`WorkerLostError` when it is lost."""
        self.hangs.clear()
        await race(_answer(self.actor.wait.remote()), self._until_lost())

    async def _until_lost(self) -> None:
        await self.hangs.wait()
        raise WorkerLostError(self.reason)


class RouterGroup:
    """Owns ``router.replicas`` routers on this node: starts them or takes them over, tells them of the workers, and
    replaces those that die. Must be used by the controller actor.

    Args:
        workers: the present workers by id, for routers that start.
        report: passes a line of progress to the user.

    Attributes:
        num_restarts: how often a router was replaced.
    """

    def __init__(
        self, config: BatonConfig, secret: bytes, workers: Mapping[str, WorkerInfo], report: Callable[[str], None]
    ) -> None:
        self.num_restarts = 0
        self._config = config
        self._secret = secret
        self._workers = workers
        self._report = report
        self._port = config.router.port  # 0 means any free one until the first router has started
        self._places = [_Place(index) for index in range(config.router.replicas)]
        self._pulses = ProgressWatch(config.liveness, self._judged, what="router")

    async def start(self, *, follows_others: bool = False) -> str:
        """Starts the routers; returns the endpoint's URL.

        Args:
            follows_others: routers of this cluster have just been ended, and may have the port for a moment.

        Raises:
            BatonError: one cannot start; the message says why.
        """
        first, *others = self._places
        if others and not follows_others:  # routers of another cluster could share the port, too
            listen(self._config.router.host, self._port).close()
        bears = (BatonError, RayError) if follows_others else (_LostInStartError,)
        endpoint = await self._start_until_up(first, bears)
        await asyncio.gather(*(self._start_until_up(other, (_LostInStartError,)) for other in others))
        return endpoint

    async def take_over(self, found: Sequence[FoundRouter]) -> str:
        """Makes routers that have lost their controller obey this one, and starts those that are missing.

        Returns:
            The endpoint's URL.
        """
        self._port, known = found[0].port, {router.index: router for router in found}
        kept = [place for place in self._places if place.index in known]
        for place in self._places:
            if place not in kept:
                self._report(f"{self._name(place)} is lost, too; starting another one")
        endpoints = await asyncio.gather(*(self._take_over(place, known[place.index]) for place in kept))
        await asyncio.gather(*(self._start(place) for place in self._places if place.index not in known))
        return endpoints[0]

    async def reload(self, config: BatonConfig) -> None:
        """Gives the routers the API keys and SLO classes of ``config``, and to those that replace them.

        Raises:
            BatonError: they cannot be used. The first router finds that out, and nothing has changed; if another one
                does, because a file has changed meanwhile, reload again.
        """
        for place in self._places:
            await self._reload(place, config)
            self._config = config

    async def check_model(self, config: BatonConfig) -> None:
        """Raises :class:`ConfigError` if the routers cannot serve the model of ``config``: see ``RouterHost``."""
        for router in self._actors()[:1]:
            await _answer(router.check_model.remote(config.to_dict()))

    async def tell(self, method: str, *arguments: Any) -> None:
        """Calls ``add_worker``, ``drain_worker`` or ``remove_worker`` of every router."""
        calls = [getattr(router, method).remote(*arguments) for router in self._actors()]
        for error in _errors(await asyncio.gather(*calls, return_exceptions=True)):
            logger.warning("a router did not accept %s: %s", method, logged(error))

    async def watch(self) -> None:
        """Replaces routers that die or hang, on the same port and with the existing workers, until cancelled.

        Raises:
            BatonError, RayError: one cannot be replaced.
        """
        await race(self._pulses.run(), self._watch_all())

    async def stop(self) -> None:
        """Stops the routers; running requests end with an error."""
        await asyncio.gather(*map(self._stop, self._places))

    async def _start(self, place: _Place) -> str:
        # On this node, because the endpoint must be where the user started the cluster, and keep its port.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        config = self._config
        actor_class: Any = ray.remote(RouterActor).options(
            num_cpus=0,
            max_concurrency=1000,
            scheduling_strategy=here,
            **survival_options(config.ray, Kind.ROUTER),
        )
        handle = ray.get_runtime_context().current_actor
        router = actor_class.remote(
            config.to_dict(), self._port, handle, self._secret, carried_variables(), place.index
        )
        limit_s = config.ray.attempt_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                endpoint, self._port = await _answer(router.start.remote())
            while self._config is not config:  # the others were reloaded meanwhile
                config = self._config
                await _answer(router.reload.remote(config.to_dict()))
        except (BatonError, RayTaskError):
            ray.kill(router, no_restart=True)
            raise
        except TimeoutError as error:
            ray.kill(router, no_restart=True)
            raise _LostInStartError(f"The router did not start within {limit_s:g} s.") from error
        except RayActorError as error:
            kind = WorkerLostError if has_failed_to_begin(error) else _LostInStartError
            raise kind(f"The router cannot start: {short_reason(error)}") from error
        # Without awaiting between, so that later changes of workers cannot overtake these calls.
        place.actor = router
        self._introduce()
        known = [router.add_worker.remote(info.to_dict()) for info in self._workers.values()]
        await asyncio.gather(*known, return_exceptions=True)
        return str(endpoint)

    async def _take_over(self, place: _Place, found: FoundRouter) -> str:
        """Makes a router that has lost its controller obey this one, or replaces it; returns the endpoint's URL."""
        place.actor = found.actor
        handle = ray.get_runtime_context().current_actor
        try:
            async with asyncio.timeout(_ANSWER_S):
                await found.actor.follow.remote(handle, [info.to_dict() for info in self._workers.values()])
        except (RayError, TimeoutError) as error:
            logger.error("a router cannot be taken over and is replaced: %s", logged(error))
            self._report(f"{self._name(place)} does not answer; starting another one")
            place.actor = None
            ray.kill(found.actor, no_restart=True)
            return await self._start_until_up(place)
        self._introduce()
        await self._reload(place, self._config)
        return found.endpoint

    async def _reload(self, place: _Place, config: BatonConfig) -> None:
        if place.actor is None:
            return
        try:
            await _answer(place.actor.reload.remote(config.to_dict()))
        except RayActorError:
            logger.warning("a router died before it reloaded; the next one starts with this configuration")

    async def _watch_all(self) -> None:
        await asyncio.gather(*map(self._watch, self._places))

    async def _watch(self, place: _Place) -> None:
        while True:
            router = place.actor
            pulse = RouterPulse(router)
            self._pulses.add(place.name, pulse)
            try:
                return await place.run()
            except (BatonError, RayError) as error:
                logger.error("the router is lost and is being replaced: %s", logged(error))
                why = f" ({place.reason})" if place.hangs.is_set() else ""
                self._report(f"{self._name(place)} is lost{why}, and its open streams break off; starting another one")
                self.num_restarts += 1
            finally:
                self._pulses.remove(place.name)
            died_s = time.monotonic()
            place.actor = None
            end_process(pulse.pid)  # it may have failed without dying, and it has the port
            ray.kill(router, no_restart=True)
            endpoint = await self._start_until_up(place)
            self._report(f"{self._name(place)} serves again at {endpoint}, after {time.monotonic() - died_s:.1f} s")

    def _judged(self, name: str, standing: Standing, reason: str) -> None:
        place = next(place for place in self._places if place.name == name)
        place.reason = reason
        if standing is Standing.LOST:
            place.hangs.set()
        elif standing is Standing.SUSPECTED:
            what = f"it is replaced if it stays silent for {self._config.liveness.replace_after:g} s more"
            self._report(f"{self._name(place)} may hang: {reason}; {what}")
        else:
            self._report(f"{self._name(place)} answers again")

    def _name(self, place: _Place) -> str:
        """The router in reports."""
        return "the router" if len(self._places) == 1 else place.name

    async def _start_until_up(self, place: _Place, bears: tuple[type[Exception], ...] = (BatonError, RayError)) -> str:
        """Starts the router, again after an error of the kinds ``bears``, a few times; returns the endpoint's URL."""
        for _ in range(_RESTARTS - 1):
            try:
                return await self._start(place)
            except bears as error:
                self._report(f"{self._name(place)} could not be started; trying again: {short_reason(error)}")
                await asyncio.sleep(_RESTART_PAUSE_S)
        return await self._start(place)

    async def _stop(self, place: _Place) -> None:
        router, place.actor = place.actor, None
        if router is None:
            return
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await asyncio.ensure_future(router.stop.remote())
        except (RayError, TimeoutError):
            logger.info("the router did not stop by itself")
        ray.kill(router, no_restart=True)

    def _actors(self) -> list[Any]:
        return [place.actor for place in self._places if place.actor is not None]

    def _introduce(self) -> None:
        """Tells every router of the others, whenever one has come."""
        routers = {place.index: place.actor for place in self._places if place.actor is not None}
        if len(self._places) > 1:
            for router in routers.values():
                router.meet.remote(routers)


def _errors(results: Iterable[Any]) -> Iterable[RayError]:
    """The errors of Ray among some results; raises any other error."""
    for result in results:
        if isinstance(result, RayError):
            yield result
        elif isinstance(result, BaseException):
            raise result


async def _answer(call: Any) -> Any:
    """The result of an actor call; a ``BatonError`` of the actor is raised as such."""
    try:
        return await call
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, BatonError) else error from None
