"""Applies planned faults to the workers of a pool, each when the pool has recovered from the one before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil

from baton.core.roles import POOLS
from tests.chaos.faults import Victim
from tests.chaos.plan import STAGE_NAMES, Planned, Stage
from tests.chaos.target import Target

RECOVERY_S = 180.0
"""A pool that is not complete this long after a fault has failed to recover."""
_STAGE_WAIT_S = 5.0
_POLL_S = 0.02
_SLOW_POLL_S = 0.25


@dataclass
class Strike:
    """A fault that happened.

    Attributes:
        at_s, recovered_s: monotonic seconds; infinite if the pool has not recovered.
        stages: the number of the victim's requests at each stage, by its own word just before.
    """

    pool: str
    worker: str
    kind: str
    fault: str
    at_s: float
    stages: Mapping[str, int]
    recovered_s: float = float("inf")


class RecoveryError(Exception):
    """A pool does not become complete again."""


@dataclass
class Injector:
    """Faults in all pools of a cluster. Both pools have faults at the same time, but each keeps one untouched worker.

    Attributes:
        strikes: what has happened so far.
    """

    target: Target
    strikes: list[Strike] = field(default_factory=list)
    _pools: dict[str, asyncio.Lock] = field(default_factory=lambda: {pool: asyncio.Lock() for pool in POOLS})

    async def run(self, pool: str, plan: Iterator[Planned], stop: asyncio.Event) -> None:
        """Applies faults to workers of ``pool`` until ``stop`` is set and the pool has recovered.

        Raises:
            RecoveryError: the pool does not recover.
        """
        for planned in plan:
            async with AsyncExitStack() as stack:
                concerned = planned.fault.pools(pool)
                for name in POOLS:
                    if name in concerned:
                        await stack.enter_async_context(self._pools[name])
                await self._until_complete(concerned)
                if stop.is_set():
                    return
                await self._strike(pool, planned)

    async def _strike(self, pool: str, planned: Planned) -> None:
        worker = await self._worker_at(pool, planned.stage)
        victim = await self._victim(pool, worker)
        fault = planned.fault
        names = STAGE_NAMES[pool]
        stages = {names[stage]: int(worker[stage]) for stage in Stage}
        strike = Strike(pool, worker["id"], fault.kind, fault.name, time.monotonic(), stages)
        self.strikes.append(strike)
        ongoing = asyncio.create_task(fault.strike(victim))
        try:
            while True:
                await asyncio.sleep(_SLOW_POLL_S)
                alive = await self.target.workers(pool)
                is_gone = worker["id"] not in [each["id"] for each in alive]
                if (is_gone or not fault.replaces) and (is_gone or ongoing.done()) and self._are_complete(alive):
                    break
                if time.monotonic() - strike.at_s > RECOVERY_S:
                    raise RecoveryError(f"{pool} has not recovered from {fault.name} of {worker['id']}: {alive}")
            strike.recovered_s = time.monotonic()
        finally:
            await ongoing

    async def _worker_at(self, pool: str, stage: Stage) -> dict[str, Any]:
        """A worker with requests at this stage; after a while, the one with most requests."""
        give_up_s = time.monotonic() + _STAGE_WAIT_S
        while True:
            workers = [worker for worker in await self.target.workers(pool) if Stage.QUEUED in worker]
            found = max(workers, key=lambda worker: (worker[stage], worker["in_flight"]))
            if found[stage] or time.monotonic() > give_up_s:
                return found
            await asyncio.sleep(_POLL_S)

    async def _victim(self, pool: str, worker: Mapping[str, Any]) -> Victim:
        process = psutil.Process(worker["pid"])
        if not self.target.hosts:
            return Victim(process)
        others = [each for name in POOLS if name != pool for each in await self.target.workers(name)]
        partner = max(others, key=lambda each: int(each["in_flight"]))
        return Victim(process, self.target.host_of(worker), self.target.host_of(partner))

    async def _until_complete(self, pools: Sequence[str]) -> None:
        give_up_s = time.monotonic() + RECOVERY_S
        for pool in pools:
            while not self._are_complete(workers := await self.target.workers(pool)):
                if time.monotonic() > give_up_s:
                    raise RecoveryError(f"{pool} is not complete: {workers}")
                await asyncio.sleep(_SLOW_POLL_S)

    def _are_complete(self, workers: Sequence[Mapping[str, Any]]) -> bool:
        return [worker["state"] for worker in workers] == ["ready"] * self.target.size
