"""Swings of load and of its mix, against an oracle that knows them beforehand and needs no time to start workers."""

from __future__ import annotations

import pytest

from baton.core.roles import DECODE, POOLS, PREFILL
from tests.unit.cluster.autoscaling.fluid import FluidCluster, Load
from tests.unit.cluster.autoscaling.scenarios import limits

SWING_S = 600.0
LIMITS = limits(calm_s=30.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [(Load(15, 1000, 200), Load(60, 1000, 200)), (Load(30, 2000, 100), Load(30, 500, 400))],
    ids=["4x the load", "4x the prompts, then 4x the answers"],
)
def test_swings_are_followed_with_few_more_workers_than_an_oracle(first, second):
    cluster = FluidCluster(LIMITS, {PREFILL: 9, DECODE: 9})
    cluster.run(3 * SWING_S, lambda now_s: first if now_s % (2 * SWING_S) < SWING_S else second)
    assert cluster.attainment(lambda at_s: at_s % SWING_S >= 60) >= 0.95
    assert sum(cluster.worker_s.values()) <= 1.25 * sum(cluster.oracle_s.values())


def test_a_constant_load_settles_and_stays():
    cluster = FluidCluster(LIMITS, {PREFILL: 6, DECODE: 6})
    cluster.run(1800, lambda now_s: Load(20, 1000, 200))
    settled = [change for change in cluster.changes if change[0] > 300]
    assert len(settled) <= 2, settled
    assert cluster.attainment(lambda at_s: at_s > 60) >= 0.95


def test_without_requests_both_pools_shrink_to_their_minimum():
    cluster = FluidCluster(LIMITS, {PREFILL: 4, DECODE: 4})
    cluster.run(120, lambda now_s: Load(30, 1000, 200))
    cluster.run(600, lambda now_s: Load(0, 1000, 200))
    assert {name: cluster.tanks[name].target for name in POOLS} == {PREFILL: 1, DECODE: 1}
