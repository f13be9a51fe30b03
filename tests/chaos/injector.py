"""Applies planned faults to the workers of a pool, each when the pool has recovered from the one before."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil

from baton.core.roles import POOLS
from tests.chaos.faults import KILL, Fault, Victim
from tests.chaos.plan import STAGE_NAMES, Planned, Stage
from tests.chaos.target import RECOVERY_S, RecoveryError, Target
from tests.namespaces import Host
from tests.waiting import until

logger = logging.getLogger(__name__)

_STAGE_WAIT_S = 5.0
_POLL_S = 0.1


@dataclass
class Strike:
    """A fault that happened.

    Attributes:
        silences: whether nothing comes from the worker meanwhile.
        at_s, recovered_s: monotonic seconds; infinite if the pool has not recovered.
        stages: the number of the victim's requests at each stage, by its own word just before.
    """

    pool: str
    worker: str
    kind: str
    fault: str
    silences: bool
    at_s: float
    stages: Mapping[str, int]
    recovered_s: float = float("inf")

    def __str__(self) -> str:
        stages = ", ".join(f"{count} {name}" for name, count in self.stages.items())
        return f"{self.worker} ({stages}): {self.fault}, complete after {self.recovered_s - self.at_s:.1f} s"


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
                concerned = POOLS if planned.fault.concerns_both else (pool,)
                for name in concerned:
                    await stack.enter_async_context(self._pools[name])
                for name in concerned:
                    await self.target.until_complete(name)
                if stop.is_set():
                    return
                await self._strike(pool, planned)

    async def _strike(self, pool: str, planned: Planned) -> None:
        worker, partner = await self._at(pool, planned.stage)
        hosts = [self.target.host_of(each) for each in (worker, partner)] if self.target.hosts else []
        fault = planned.fault
        if fault.is_of_host and hosts[0] in await self._other_hosts(worker):
            fault = KILL  # it would cost the pool both workers; a killed one is placed on an empty host
        victim = Victim(self.target, pool, psutil.Process(worker["pid"]), *hosts)
        names = STAGE_NAMES[pool]
        stages = {names[stage]: int(worker[stage]) for stage in Stage}
        strike = Strike(pool, worker["id"], fault.kind, fault.name, fault.silences, time.monotonic(), stages)
        self.strikes.append(strike)
        ongoing = asyncio.ensure_future(fault.strike(victim))
        try:
            await until(lambda: self._is_over(ongoing, fault, pool, worker["id"]), RECOVERY_S, _POLL_S)
            await self.target.until_complete(pool)
        except TimeoutError:
            raise RecoveryError(f"{worker['id']} was not replaced after this fault: {fault.name}") from None
        finally:
            await ongoing
        strike.recovered_s = time.monotonic()
        logger.info("%s", strike)

    async def _other_hosts(self, worker: Mapping[str, Any]) -> list[Host]:
        others = await self.target.workers(worker["pool"])
        return [self.target.host_of(each) for each in others if each["id"] != worker["id"]]

    async def _is_over(self, ongoing: asyncio.Future[None], fault: Fault, pool: str, worker_id: str) -> bool:
        if ongoing.done() and not fault.replaces:
            return True
        return worker_id not in [worker["id"] for worker in await self.target.workers(pool)]

    async def _at(self, pool: str, stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
        """A worker with requests at this stage, or after a while the one with most requests; and one of the other
        pool."""
        give_up_s = time.monotonic() + _STAGE_WAIT_S
        while True:
            workers = [worker for worker in await self.target.workers() if stage in worker]
            own = [worker for worker in workers if worker["pool"] == pool]
            own.sort(key=lambda each: (each[stage], each["in_flight"]))
            others = [worker for worker in workers if worker["pool"] != pool]
            others.sort(key=lambda each: each["in_flight"])
            if own and others and (own[-1][stage] or time.monotonic() > give_up_s):
                return own[-1], others[-1]
            await asyncio.sleep(_POLL_S)
