"""Simulated workers of one process."""

from __future__ import annotations

import asyncio
from itertools import count

from baton.core.roles import POOLS
from baton.kv_transfer.base import KVSink
from baton.kv_transfer.payload.in_process import InProcessKVTransport
from cluster.config.config import BatonConfig
from cluster.registry.workers import WorkerInfo
from cluster.simulation.client import InProcessClient
from cluster.simulation.profile import TimingProfile
from cluster.simulation.settings import worker_settings
from cluster.simulation.worker import SimulatedWorker

_NODE = "simulated"


class VirtualCluster:
    """Adds and removes workers, and counts the hours of paid workers."""

    def __init__(self, config: BatonConfig, profile: TimingProfile) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._profile = profile
        self._sinks: dict[str, KVSink] = {}
        self._transport = InProcessKVTransport(self._sinks)
        self._workers: dict[str, SimulatedWorker] = {}
        self._hours = {pool: _Meter() for pool in POOLS}
        self.sizes: list[tuple[float, str, int]] = []
        """(time, pool, number of paid workers) after each change."""
        self._numbers = {pool: count(1) for pool in POOLS}

    @property
    def workers(self) -> list[SimulatedWorker]:
        return list(self._workers.values())

    def connect(self, address: str) -> InProcessClient:
        """Creates the client of a worker, for the table of a router."""
        return InProcessClient(address, self._workers.get(address))

    def add(self, pool: str) -> WorkerInfo:
        """Adds a worker, which is ready at once, to a pool."""
        worker_id = f"{pool}-{next(self._numbers[pool])}"
        settings = worker_settings(self._config, self._profile, worker_id, pool, with_steps=False)
        worker = SimulatedWorker(settings, self._transport)
        self._workers[worker_id] = worker
        self._sinks[worker_id] = worker.sink
        return settings.info(worker_id, "", _NODE, 0)

    def remove(self, worker_id: str) -> None:
        """Removes a worker, which can no longer be reached."""
        self._sinks.pop(worker_id, None)
        self._workers.pop(worker_id, None)

    def paid(self, pool: str, change: int) -> None:
        """Changes the number of paid workers of a pool, which includes starting and draining ones."""
        self._hours[pool].change(change, self._loop.time())
        self.sizes.append((self._loop.time(), pool, self._hours[pool].count))

    def worker_hours(self) -> dict[str, float]:
        """Paid worker hours so far, by pool."""
        now_s = self._loop.time()
        return {pool: meter.seconds(now_s) / 3600 for pool, meter in self._hours.items()}

    def leaks(self) -> list[str]:
        """Sentences about leaked blocks."""
        return [f"{name}: {problem}" for name, worker in self._workers.items() for problem in worker.check()]


class _Meter:
    """Counts worker seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._past_s = self._since_s = 0.0

    def change(self, by: int, now_s: float) -> None:
        self._past_s = self.seconds(now_s)
        self._since_s = now_s
        self.count += by

    def seconds(self, now_s: float) -> float:
        return self._past_s + self.count * (now_s - self._since_s)
