"""A minute of faults drawn from a seed; ``make chaos`` runs more kinds of them, for as long as you like."""

from __future__ import annotations

from itertools import islice

from baton.core.roles import POOLS
from tests.chaos import clusters
from tests.chaos.plan import draw
from tests.chaos.run import Findings, connect, run
from tests.chaos.target import Target
from tests.chaos.workload import questions
from tests.running_cluster import RunningCluster

SETTINGS = {**clusters.SETTINGS, "router": {"port": 0}}
SEED = 1


async def test_faults_and_cancels_cost_no_token_and_no_block(cluster: RunningCluster) -> None:
    plans = {pool: islice(draw(SEED, pool, ["kills", "freezes"]), 2) for pool in POOLS}
    found = Findings()
    async with connect(cluster.endpoint) as http:
        target = Target(http, clusters.SIZE)
        await run(target, questions(6), plans, found, seed=SEED, seconds=30, num_clients=6, num_cancels=40)
    wrong = [stream for stream in found.streams if stream.error or stream.is_wrong]
    assert (wrong, found.problems) == ([], [])
    assert {strike.pool for strike in found.strikes} == set(POOLS)
    assert found.num_cancels >= 40
