"""The real control plane over simulated workers, in virtual time and without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from baton.core.roles import POOLS
from baton.explain.timelines import TimelineStore
from baton.process.background import BackgroundTasks
from cluster.autoscaling.traffic import KnownTraffic
from cluster.config.config import BatonConfig
from cluster.control_plane import ControlPlane
from cluster.dispatch.router import Router
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import ModelCard
from cluster.simulation.profile import TimingProfile
from cluster.simulation.virtual_cluster import VirtualCluster
from cluster.simulation.virtual_pools import PoolActions, VirtualPools
from cluster.telemetry.metrics import RouterMetrics

T = TypeVar("T")

_SAMPLES_EVERY_S = 1.0
_LEARNING_S = 10.0
"""Time in which samples are fetched every second, as by a real router. Later they are fetched less often."""


class VirtualControlPlane:
    """A :class:`ControlPlane` for each router, on the clock of the event loop, with simulated workers and pools.

    Args:
        poll_s: interval at which step samples are fetched.

    Attributes:
        routers: ``router.replicas`` of them. The first one plans the sizes of the pools, with the traffic of all.
    """

    def __init__(self, config: BatonConfig, profile: TimingProfile, poll_s: float) -> None:
        self._config = config
        self._clock = asyncio.get_running_loop().time
        self._poll_s = poll_s
        self.cluster = VirtualCluster(config, profile)
        actions = PoolActions(self._add_worker, self._remove_worker, self.cluster.paid)
        self._pools = VirtualPools(actions, profile.start_s, profile.switch_s)
        replicas = config.router.replicas
        self._planes = [self._plane(f"router-{index}" if replicas > 1 else "") for index in range(replicas)]
        self._tasks = BackgroundTasks()
        self._running: list[asyncio.Task[None]] = []
        card = ModelCard("simulated", 2**31, 2**31, 0)  # the router takes the limits of requests from the workers
        self.routers = [plane.create_router(card, TimelineStore(0)) for plane in self._planes]

    def _plane(self, router_id: str) -> ControlPlane:
        return ControlPlane(
            self._config,
            WorkerRegistry(self.cluster.connect, self._clock),
            self._pools,
            clock=self._clock,
            offload=_in_place,
            router_id=router_id,
            other_traffic=self._other_traffic,
        )

    async def _other_traffic(self) -> list[KnownTraffic]:
        """The traffic of all routers but the first one."""
        return [plane.autoscaler.own_traffic() for plane in self._planes[1:]]

    @property
    def router(self) -> Router:
        """The first router."""
        return self.routers[0]

    @property
    def registry(self) -> WorkerRegistry:
        """The workers as the first router knows them."""
        return self._planes[0].registry

    @property
    def metrics(self) -> RouterMetrics:
        """Those of the first router."""
        return self._planes[0].metrics

    async def start(self) -> None:
        """Starts the configured workers, the polling and the autoscaler."""
        await self._pools.fill({pool: self._config.pool(pool).workers for pool in POOLS})
        self._running.append(self._tasks.spawn(self._poll()))
        if self._config.autoscaler.enabled:
            self._running.append(self._tasks.spawn(self._planes[0].autoscaler.run()))

    async def _add_worker(self, pool: str) -> str:
        """Adds a worker that takes requests at once. Returns its id."""
        info = self.cluster.add(pool)
        for plane in self._planes:
            worker = plane.registry.add(info)
            plane.prefixes.add(worker)
            if plane.others is not None:
                plane.others.add(worker)
            await plane.step_costs.add(worker)
        return info.worker_id

    async def _remove_worker(self, worker_id: str) -> None:
        """Drains a worker and removes it."""
        for worker in [plane.registry.drain(worker_id) for plane in self._planes]:
            if worker is not None:
                await worker.idle.wait()
        for plane in self._planes:
            plane.prefixes.remove(worker_id)
            if plane.others is not None:
                plane.others.remove(worker_id)
            await plane.registry.remove(worker_id)
            plane.step_costs.remove(worker_id)
        self.cluster.remove(worker_id)

    def sizes(self) -> dict[str, int]:
        """Workers by pool."""
        return {pool: len(self.registry.pool(pool)) for pool in POOLS}

    async def stop(self) -> None:
        for task in self._running:
            task.cancel()
        for plane in self._planes:
            await plane.prefixes.close()
            if plane.others is not None:
                await plane.others.close()
            plane.admission.close()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLES_EVERY_S if self._clock() < _LEARNING_S else self._poll_s)
            for plane in self._planes:
                await plane.step_costs.poll()


async def _in_place(work: Callable[[], T], /) -> T:
    """Runs the work at once, since the timing of a thread would make replays nondeterministic."""
    return work()
