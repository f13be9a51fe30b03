"""Pools in virtual time: starts, departures and paid worker time."""

import asyncio
from collections import Counter

from baton.core.roles import DECODE, PREFILL
from cluster.simulation.virtual_loop import run_virtually
from cluster.simulation.virtual_pools import PoolActions, VirtualPools

START_S = 30.0


class Workers:
    """Counts them, and gives each an id."""

    def __init__(self) -> None:
        self.serving: dict[str, None] = {}
        self.num_paid: Counter[str] = Counter()
        self._number = 0
        self.pools = VirtualPools(PoolActions(self.add, self.remove, self.pay), START_S, role_change_s=1.0)

    async def add(self, pool: str) -> str:
        self._number += 1
        self.serving[f"{pool}-{self._number}"] = None
        return f"{pool}-{self._number}"

    async def remove(self, worker_id: str) -> None:
        del self.serving[worker_id]
        await asyncio.sleep(10.0)

    def pay(self, pool: str, change: int) -> None:
        self.num_paid[pool] += change


def test_workers_that_are_not_yet_ready_are_removed_first():
    """As in a real pool, which otherwise would stay below its size until the other workers have started."""

    async def run():
        workers = Workers()
        await workers.pools.fill({PREFILL: 4, DECODE: 1})
        await workers.pools.autoscale({PREFILL: 6}, None)
        await asyncio.sleep(1.0)
        await workers.pools.autoscale({PREFILL: 5}, None)
        await asyncio.sleep(1.0)
        assert len(workers.serving) == 4 + 1
        await asyncio.sleep(2 * START_S)
        assert len(workers.serving) == 5 + 1
        assert workers.num_paid == {PREFILL: 5, DECODE: 1}

    run_virtually(run)


def test_a_cancelled_start_can_be_requested_again():
    async def run():
        workers = Workers()
        await workers.pools.fill({PREFILL: 2, DECODE: 1})
        for target in (4, 2, 4):
            await workers.pools.autoscale({PREFILL: target}, None)
            await asyncio.sleep(1.0)
        await asyncio.sleep(START_S)
        assert len(workers.serving) == 4 + 1
        assert workers.num_paid[PREFILL] == 4

    run_virtually(run)


def test_a_leaving_worker_is_paid_for_until_it_is_drained():
    async def run():
        workers = Workers()
        await workers.pools.fill({PREFILL: 3, DECODE: 1})
        await workers.pools.autoscale({PREFILL: 1}, None)
        await asyncio.sleep(5.0)
        assert (len(workers.serving), workers.num_paid[PREFILL]) == (1 + 1, 3)
        await asyncio.sleep(10.0)
        assert workers.num_paid[PREFILL] == 1

    run_virtually(run)


def test_a_worker_that_changes_pools_is_ready_soon_and_paid_for_once():
    async def run():
        workers = Workers()
        await workers.pools.fill({PREFILL: 2, DECODE: 1})
        await workers.pools.autoscale({PREFILL: 1, DECODE: 2}, (PREFILL, DECODE))
        counts, _ = await workers.pools.pool_counts()
        assert (counts[PREFILL].target, counts[DECODE].target, counts[DECODE].starting) == (1, 2, 1)
        await asyncio.sleep(12.0)
        assert sorted(name.partition("-")[0] for name in workers.serving) == [DECODE, DECODE, PREFILL]
        assert workers.num_paid == {PREFILL: 1, DECODE: 2}

    run_virtually(run)
