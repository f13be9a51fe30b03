"""A listener of worker pools for tests, and what tests ask of a pool."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from cluster.controller.worker_pool import WorkerPool
from cluster.registry.workers import WorkerInfo

READY_S = 120.0
ON_BOTH_RAYS = pytest.mark.parametrize("a_ray", ["simulated", "real"], indirect=True)
"""Runs a test on a real Ray in ``make test``, too."""


@dataclass
class Listener:
    """Records what a pool tells; lets a test hold a drain or refuse a worker."""

    ready: dict[str, WorkerInfo] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    drain_timeouts_s: list[float] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    may_drain: asyncio.Event = field(default_factory=asyncio.Event)
    refuse: Exception | None = None

    async def worker_ready(self, info: WorkerInfo, *, is_outdated: bool = False) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.ready[info.worker_id] = info

    async def worker_gone(self, worker_id: str) -> None:
        self.gone.append(worker_id)
        self.ready.pop(worker_id, None)

    async def drain(self, worker_id: str, timeout_s: float) -> None:
        self.drain_timeouts_s.append(timeout_s)
        await self.may_drain.wait()
        self.drained.append(worker_id)

    def report(self, text: str) -> None:
        self.reports.append(text)


def ids_in(pool: WorkerPool, state: str) -> list[str]:
    return [worker["id"] for worker in pool.status()["workers"] if worker["state"] == state]
