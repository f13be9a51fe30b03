"""The real control plane over simulated workers, in virtual time and without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from baton.core.roles import POOLS
from baton.explain.timelines import TimelineStore
from baton.process.background import BackgroundTasks
from cluster.config.config import BatonConfig
from cluster.control_plane import ControlPlane
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
    """A :class:`ControlPlane` on the clock of the event loop, with simulated workers and pools.

    Args:
        poll_s: interval at which step samples are fetched.
    """

    def __init__(self, config: BatonConfig, profile: TimingProfile, poll_s: float) -> None:
        self._config = config
        self._clock = asyncio.get_running_loop().time
        self._poll_s = poll_s
        self.cluster = VirtualCluster(config, profile)
        actions = PoolActions(self._add_worker, self._remove_worker, self.cluster.paid)
        self._pools = VirtualPools(actions, profile.start_s, profile.switch_s)
        self._plane = ControlPlane(config, self.registry, self._pools, clock=self._clock, offload=_in_place)
        self._tasks = BackgroundTasks()
        self._running: list[asyncio.Task[None]] = []
        card = ModelCard("simulated", 2**31, 2**31, 0)  # the router takes the limits of requests from the workers
        self.router = self._plane.create_router(card, TimelineStore(0))

    @property
    def registry(self) -> WorkerRegistry:
        return self.cluster.registry

    @property
    def metrics(self) -> RouterMetrics:
        return self._plane.metrics

    async def start(self) -> None:
        """Starts the configured workers, the polling and the autoscaler."""
        await self._pools.fill({pool: self._config.pool(pool).workers for pool in POOLS})
        self._running.append(self._tasks.spawn(self._poll()))
        if self._config.autoscaler.enabled:
            self._running.append(self._tasks.spawn(self._plane.autoscaler.run()))

    async def _add_worker(self, pool: str) -> str:
        """Adds a worker that takes requests at once. Returns its id."""
        worker = self.cluster.add(pool)
        self._plane.prefixes.add(worker)
        await self._plane.step_costs.add(worker)
        return worker.info.worker_id

    async def _remove_worker(self, worker_id: str) -> None:
        """Drains a worker and removes it."""
        worker = self.registry.drain(worker_id)
        if worker is not None:
            await worker.idle.wait()
            self._plane.prefixes.remove(worker_id)
            await self.cluster.remove(worker_id)
            self._plane.step_costs.remove(worker_id)

    def sizes(self) -> dict[str, int]:
        """Workers by pool."""
        return {pool: len(self.registry.pool(pool)) for pool in POOLS}

    async def stop(self) -> None:
        for task in self._running:
            task.cancel()
        await self._plane.prefixes.close()
        self._plane.admission.close()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLES_EVERY_S if self._clock() < _LEARNING_S else self._poll_s)
            await self._plane.step_costs.poll()


async def _in_place(work: Callable[[], T], /) -> T:
    """Runs the work at once, since the timing of a thread would make replays nondeterministic."""
    return work()
