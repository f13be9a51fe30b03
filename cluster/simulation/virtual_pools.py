"""Pools for the autoscaler, whose workers take virtual time to start and are drained before they end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from baton.core.roles import POOLS
from baton.process.background import BackgroundTasks
from cluster.autoscaling.observation import PoolCounts


class _Pool:
    def __init__(self) -> None:
        self.target = 0
        self.ready: list[str] = []
        self.starting = 0
        self.draining = 0


@dataclass(frozen=True, slots=True)
class PoolActions:
    """The actions of pools on their workers.

    Attributes:
        add: adds a ready worker to a pool; returns its id.
        remove: drains and removes a worker.
        paid: changes the number of paid workers of a pool by 1 or -1.
    """

    add: Callable[[str], Awaitable[str]]
    remove: Callable[[str], Awaitable[None]]
    paid: Callable[[str, int], None]


class VirtualPools:
    """Implements :class:`cluster.autoscaling.autoscaler_loop.PoolControl`.

    Args:
        start_s: seconds from the request for a worker until it serves.
        role_change_s: seconds of a drained worker's change to the other pool.
    """

    def __init__(self, actions: PoolActions, start_s: float, role_change_s: float) -> None:
        self._actions = actions
        self._start_s = start_s
        self._role_change_s = role_change_s
        self._pools = {pool: _Pool() for pool in POOLS}
        self._tasks = BackgroundTasks()

    async def fill(self, sizes: Mapping[str, int]) -> None:
        """Brings the pools to their first sizes, at once."""
        for name, size in sizes.items():
            pool = self._pools[name]
            pool.target = size
            for _ in range(size):
                self._actions.paid(name, 1)
                pool.ready.append(await self._actions.add(name))

    async def pool_counts(self) -> tuple[Mapping[str, PoolCounts], str]:
        counts = {
            name: PoolCounts(
                target=pool.target,
                ready=len(pool.ready),
                starting=pool.starting,
                draining=pool.draining,
                start_s=self._start_s,
                role_change_s=self._role_change_s,
            )
            for name, pool in self._pools.items()
        }
        return counts, ""

    async def autoscale(self, targets: dict[str, int], role_change: tuple[str, str] | None) -> None:
        if role_change is not None and len(self._pools[role_change[0]].ready) > 1:
            self._change_role(*role_change)
        for name, target in targets.items():
            self._scale(name, target)

    def _scale(self, name: str, target: int) -> None:
        pool = self._pools[name]
        pool.target = target
        for _ in range(target - len(pool.ready) - pool.starting):
            self._tasks.spawn(self._start(name, self._start_s))
        for _ in range(len(pool.ready) - target):  # surplus starting workers never join
            self._tasks.spawn(self._leave(name, pool.ready.pop()))

    def _change_role(self, source: str, destination: str) -> None:
        old_pool, new_pool = self._pools[source], self._pools[destination]
        old_pool.target -= 1
        new_pool.target += 1
        new_pool.starting += 1
        worker_id = old_pool.ready.pop()

        async def change() -> None:
            await self._leave(source, worker_id)
            new_pool.starting -= 1
            await self._start(destination, self._role_change_s)

        self._tasks.spawn(change())

    async def _start(self, name: str, seconds: float) -> None:
        pool = self._pools[name]
        pool.starting += 1
        self._actions.paid(name, 1)
        await asyncio.sleep(seconds)
        pool.starting -= 1
        if len(pool.ready) >= pool.target:  # the target has shrunk
            self._actions.paid(name, -1)
            return
        pool.ready.append(await self._actions.add(name))

    async def _leave(self, name: str, worker_id: str) -> None:
        pool = self._pools[name]
        pool.draining += 1
        await self._actions.remove(worker_id)
        pool.draining -= 1
        self._actions.paid(name, -1)
