"""Pools that shrink to no worker, and wake with a request."""

from __future__ import annotations

from baton.core.roles import DECODE, POOLS
from cluster.autoscaling.autoscaler import AutoscalerState
from cluster.autoscaling.observation import PoolCounts
from cluster.autoscaling.pool_rules import Reason
from cluster.autoscaling.scaling_limits import PoolLimits
from tests.unit.cluster.autoscaling.scenarios import decide, demand, limits, observe

SLEEPY = limits(pools=dict.fromkeys(POOLS, PoolLimits(0, 4)))


def test_idle_pools_shrink_to_zero_and_wake_with_the_first_request():
    decided = decide(observe(0.0, demand(0), 1, 1), SLEEPY)
    decided = decide(observe(SLEEPY.calm_s, demand(0), 1, 1), SLEEPY, decided.state)
    assert {(pool.target, pool.reason) for pool in decided.pools.values()} == {(0, Reason.IDLE)}
    empty = PoolCounts(0)
    decided = decide(observe(100.0, demand(0), empty, empty), SLEEPY, decided.state)
    assert {(pool.target, pool.reason) for pool in decided.pools.values()} == {(0, Reason.IDLE)}
    decided = decide(observe(105.0, demand(0.05), empty, empty), SLEEPY, decided.state)
    assert {(pool.target, pool.reason) for pool in decided.pools.values()} == {(1, Reason.WAKE)}
    assert "the pool has no worker" in decided.pools[DECODE].texts[0]


def test_a_waking_pool_waits_for_its_first_worker_without_asking_for_more():
    """The request that woke it is forgotten before a cloud has brought the node."""
    state = AutoscalerState()
    for now_s in range(0, int(SLEEPY.place_timeout_s), 5):
        waking = PoolCounts(1, starting=1, pending=1, pending_s=float(now_s))
        decided = decide(observe(float(now_s), demand(0), waking, waking), SLEEPY, state)
        assert {pool.target for pool in decided.pools.values()} == {1}
        state = decided.state
    hopeless = PoolCounts(1, starting=1, pending=1, pending_s=SLEEPY.place_timeout_s)
    for now_s in (1000.0, 1000.0 + SLEEPY.calm_s):
        decided = decide(observe(now_s, demand(0), hopeless, hopeless), SLEEPY, state)
        state = decided.state
    assert {pool.target for pool in decided.pools.values()} == {0}


def test_a_pool_that_is_awake_waits_for_the_other_one():
    """Requests need both, and the node of one may come much later."""
    awake, state = PoolCounts(1, ready=1), AutoscalerState()
    for now_s in range(0, int(SLEEPY.place_timeout_s), 5):
        waking = PoolCounts(1, starting=1, pending=1, pending_s=float(now_s))
        decided = decide(observe(float(now_s), demand(0), awake, waking), SLEEPY, state)
        assert {pool.target for pool in decided.pools.values()} == {1}
        state = decided.state
    for now_s in (1000.0, 1000.0 + SLEEPY.calm_s):
        decided = decide(observe(now_s, demand(0), awake, awake), SLEEPY, state)
        state = decided.state
    assert {pool.target for pool in decided.pools.values()} == {0}


def test_an_idle_plan_says_that_earlier_requests_do_not_count():
    """Right after a benchmark, a user asks for a plan."""
    (text,) = decide(observe(0.0, demand(0, seen=24), 1, 1), SLEEPY).pools[DECODE].texts
    assert "the last 10 s had none, though the last 5 minutes had 24" in text
    (text,) = decide(observe(0.0, demand(0, seen=0), 1, 1), SLEEPY).pools[DECODE].texts
    assert text.endswith("no requests arrive or wait.")
