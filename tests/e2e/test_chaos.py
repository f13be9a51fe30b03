"""A minute of faults drawn from a seed; ``make chaos`` runs more kinds of them, for as long as you like."""

from __future__ import annotations

from itertools import islice

from baton.core.roles import POOLS
from tests.chaos.plan import draw
from tests.chaos.report import checks
from tests.chaos.run import Findings, connect, run_cancels, run_faults
from tests.chaos.target import Target
from tests.chaos.workload import questions
from tests.e2e.conftest import SMALL_CHUNKS
from tests.running_cluster import RunningCluster

SETTINGS = SMALL_CHUNKS
SEED = 1


async def test_faults_and_cancels_cost_no_token_and_no_block(two_of_each: RunningCluster) -> None:
    known = questions(num_prompts=6)
    findings = Findings()
    plans = {pool: islice(draw(SEED, pool, ["kills", "freezes"]), 2) for pool in POOLS}
    async with connect(two_of_each.endpoint) as http:
        target = Target(http, size=2)
        await run_faults(target, known, plans, findings, seed=SEED, seconds=60, num_clients=6)
        await run_cancels(target, known, findings, seed=SEED, num_cancels=40)
    wrong = [stream for stream in findings.streams if stream.error or stream.is_wrong]
    assert (wrong, findings.problems) == ([], [])
    assert {strike.pool for strike in findings.strikes} == set(POOLS)
    assert findings.num_cancels >= 40
    assert checks(findings)
