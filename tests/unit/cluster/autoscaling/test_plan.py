"""The autoscaler's decisions, one property a test."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.roles import DECODE, POOLS, PREFILL
from baton.core.slo import BATCH, INTERACTIVE, STANDARD
from cluster.autoscaling.autoscaler import AutoscalerState, plan
from cluster.autoscaling.demand import Demand
from cluster.autoscaling.observation import PoolCounts
from cluster.autoscaling.pool_rules import Reason
from cluster.autoscaling.scaling_limits import PoolLimits
from tests.unit.cluster.autoscaling.scenarios import (
    COSTS,
    LIMITS,
    FormulaCosts,
    Planned,
    decide,
    demand,
    limits,
    observe,
)

RATES = st.floats(0, 500)
PROMPTS = st.floats(1, 8000)
OUTPUTS = st.floats(1, 2000)
CLASSES = st.sampled_from((INTERACTIVE, STANDARD, BATCH))


@given(RATES, PROMPTS, OUTPUTS, CLASSES, st.integers(0, 20), st.integers(0, 20), st.integers(1, 9), st.integers(0, 9))
def test_targets_never_leave_their_limits(rate, prompt, output, slo, prefill, decode, least, more):
    bounds = limits(pools=dict.fromkeys(POOLS, PoolLimits(least, least + more)))
    decided = decide(observe(0.0, demand(rate, prompt, output, slo), prefill, decode), bounds)
    for pool in decided.pools.values():
        assert least <= pool.target <= least + more


def test_the_unlimited_demand_is_reported():
    """The alert about pools that are too small compares it with the workers that are ready."""
    bounds = limits(pools=dict.fromkeys(POOLS, PoolLimits(1, 3)))
    needed = decide(observe(0.0, demand(40))).pools[PREFILL].target
    assert needed > 3
    for size in (1, 3):
        pool = decide(observe(0.0, demand(40), size, 3), bounds).pools[PREFILL]
        assert (pool.target, pool.wanted) == (3, needed)
        assert f"{needed} workers" in pool.texts[0]
        assert "3 workers meet the targets" not in pool.texts[0]
        assert "allows at most 3" in pool.texts[0]


def test_a_manual_size_that_is_too_small_is_reported():
    pinned = PoolCounts(2, 2, pinned=True)
    pool = decide(observe(0.0, demand(40), pinned, 8)).pools[PREFILL]
    assert (pool.target, pool.reason) == (2, Reason.PINNED)
    assert pool.wanted > 2


@settings(max_examples=60)
@given(RATES, st.floats(1, 4), PROMPTS, OUTPUTS, CLASSES)
def test_more_load_never_needs_fewer_workers(rate, factor, prompt, output, slo):
    less = decide(observe(0.0, demand(rate, prompt, output, slo)))
    more = decide(observe(0.0, demand(rate * factor, prompt, output, slo)))
    for name in POOLS:
        assert more.pools[name].wanted >= less.pools[name].wanted


@pytest.mark.parametrize("factor", [4.0, 16.0])
def test_a_swing_is_followed_in_one_step(factor):
    pools = Planned()
    pools.run(120, demand(10))
    pools.step(demand(10 * factor))
    after = dict(pools.sizes)
    pools.run(300, demand(10 * factor))
    assert pools.sizes == after
    assert after[PREFILL] > 2
    assert after[DECODE] > 2


@pytest.mark.parametrize(
    ("before", "after", "grows", "stays"),
    [
        (demand(40, 200, 400), demand(40, 2000, 400), PREFILL, DECODE),
        (demand(40, 200, 100), demand(40, 200, 1000), DECODE, PREFILL),
    ],
    ids=["longer prompts", "longer answers"],
)
def test_pools_scale_independently(before, after, grows, stays):
    pools = Planned()
    pools.run(60, before)
    sizes = dict(pools.sizes)
    pools.step(after)
    assert pools.sizes[grows] >= 2 * sizes[grows]
    assert pools.sizes[stays] <= sizes[stays] + 1


def test_pools_shrink_one_by_one_after_a_calm_period_even_without_load():
    pools = Planned(prefill=6, decode=9)
    pools.run(55, demand(0))
    assert pools.changes == []
    pools.run(400, demand(0))
    assert pools.sizes == {PREFILL: 1, DECODE: 1}
    for name, first in ((PREFILL, 5), (DECODE, 8)):
        steps = [(at_s, size) for at_s, of, size in pools.changes if of == name]
        assert [size for _, size in steps] == list(range(first, 0, -1))
        assert steps[0][0] >= LIMITS.calm_s
        assert all(later - sooner >= LIMITS.interval_s for (sooner, _), (later, _) in pairwise(steps))


def test_a_pool_shrinks_only_if_the_smaller_one_sustains_the_load():
    """Between what n workers bear, and what n - 1 bear with headroom, nothing changes."""
    pools = Planned(limits(headroom=0.15))
    pools.run(60, demand(40))
    settled = dict(pools.sizes)
    pools.run(600, demand(40 / 1.05))
    assert pools.sizes == settled
    pools.run(600, demand(40 / 2))
    assert pools.sizes[PREFILL] < settled[PREFILL]
    assert pools.sizes[DECODE] < settled[DECODE]


def test_a_shrinking_pool_grows_at_once_when_load_returns():
    pools = Planned()
    pools.run(60, demand(40))
    full = dict(pools.sizes)
    pools.run(120, demand(5))
    assert pools.sizes[PREFILL] < full[PREFILL]
    pools.step(demand(40))
    assert pools.sizes == full


def test_constant_noisy_load_changes_almost_nothing_in_an_hour():
    noise = random.Random(5)
    pools = Planned()
    pools.run(120, demand(40))
    pools.changes.clear()
    while pools.now_s < 120 + 3600:
        # Twice the relative error that a minute of 40 requests/s has by chance.
        pools.step(demand(40 * (1 + noise.gauss(0, 2 / math.sqrt(60 * 40)))))
    assert len(pools.changes) <= 3, pools.changes


def test_starting_workers_count_as_future_capacity():
    first = decide(observe(0.0, demand(40)))
    wanted = first.pools[PREFILL].target
    starting = PoolCounts(target=wanted, ready=1, starting=wanted - 1, start_s=20.0)
    again = decide(observe(5.0, demand(40), prefill=starting, decode=64), state=first.state)
    assert again.pools[PREFILL].target == wanted


def test_a_few_first_requests_start_no_worker():
    cold = decide(observe(0.0, demand(50, seen=5), prefill=2, decode=2))
    assert {pool.target for pool in cold.pools.values()} == {2}
    assert {pool.reason for pool in cold.pools.values()} == {Reason.COLD}


@pytest.mark.parametrize("costs", [None, FormulaCosts(is_measured=False, fixed=5000.0)], ids=["none", "a guess"])
def test_unmeasured_costs_start_no_worker(costs):
    cold = decide(observe(0.0, demand(50), prefill=2, decode=2, costs=costs))
    assert {pool.target for pool in cold.pools.values()} == {2}


def test_a_growing_queue_starts_a_worker_even_without_measurements():
    observation = observe(0.0, demand(50, seen=5), prefill=2, decode=2, costs=None, waiting=9.0, growth=1.0)
    decided = decide(observation)
    assert decided.pools[PREFILL].target == 3
    assert decided.pools[PREFILL].reason is Reason.QUEUE
    starting = PoolCounts(target=3, ready=2, starting=1)
    again = decide(observe(5.0, demand(50, seen=5), starting, 2, None, waiting=20.0, growth=1.0), state=decided.state)
    assert again.pools[PREFILL].target == 3


def test_a_backlog_needs_more_workers_than_the_rate():
    calm = decide(observe(0.0, demand(20)))
    piled = decide(observe(0.0, demand(20), waiting=120.0, decoding=800.0))
    for name in POOLS:
        assert piled.pools[name].target > calm.pools[name].target
        assert piled.pools[name].reason is Reason.QUEUE


def test_remaining_answers_without_new_requests_start_no_worker():
    """How long they are is known of none of them; they end by themselves."""
    decided = decide(observe(0.0, demand(0), prefill=1, decode=3, decoding=200.0))
    assert decided.pools[DECODE].target == 3
    assert decided.pools[DECODE].wanted <= 3


class TestGrowth:
    """Growth of the number of decoding sequences is extrapolated only where the rate does not explain it."""

    def wanted(self, decode, decoding, growth):
        seen = observe(0.0, demand(40), prefill=8, decode=decode, decoding=decoding, growth=growth)
        return decide(seen).pools[DECODE].wanted

    def test_growth_beyond_the_rate_starts_workers(self):
        """Answers have become longer, of which none has ended yet."""
        counts = PoolCounts(6, 6, start_s=20.0)
        expected = decide(observe(0.0, demand(40), prefill=8, decode=6)).pools[DECODE].predicted.concurrency
        assert self.wanted(counts, 1.2 * expected, 0.0) == 6
        # Those that come within 5 s to the next plan and 20 s of a start need seats as well.
        growth = 30.0 - 0.14 * math.sqrt(1.2 * expected + 1)
        assert self.wanted(counts, 1.2 * expected, 30.0) == math.ceil((1.2 * expected + 25 * growth) / 99) > 6

    def test_growth_within_chance_starts_none(self):
        """Told as growth from two standard deviations on: with many sequences that is so time and again."""
        counts = PoolCounts(6, 6, start_s=20.0)
        load = 5.9 * 99
        assert self.wanted(counts, load, 0.14 * math.sqrt(load) + 0.1) == 6
        assert self.wanted(counts, load, 0.28 * math.sqrt(load)) == 7

    def test_growth_explained_by_the_rate_starts_none(self):
        """The rate has just grown: the model knows where that ends."""
        assert self.wanted(PoolCounts(6, 6, start_s=20.0), 100.0, 20.0) == 6

    def test_growth_while_workers_start_starts_no_more(self):
        """Sequences get more because those are missing."""
        starting = PoolCounts(7, 2, starting=5, start_s=20.0)
        assert self.wanted(starting, 600.0, 40.0) == 7
        assert self.wanted(starting, 1000.0, 40.0) == math.ceil(1000 / 99)


def test_few_requests_over_a_long_time_are_a_low_rate():
    pools = Planned(prefill=4, decode=4)
    rare = demand(0.02, seen=3)
    rare = type(rare)(rare.classes, rare.num_requests, rare.local_share, seen_s=400.0)
    pools.run(600, rare)
    assert pools.sizes == {PREFILL: 1, DECODE: 1}


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_of_manual_size_is_left_alone(pool):
    counts = {name: PoolCounts(2, 2, pinned=name == pool) for name in POOLS}
    decided = decide(observe(0.0, demand(100), counts[PREFILL], counts[DECODE]))
    for name in POOLS:
        assert (decided.pools[name].target == 2) == (name == pool)
    assert decided.pools[pool].reason is Reason.PINNED
    assert f"{pool}=auto" in decided.pools[pool].texts[0]


class TestPlaces:
    """Workers for which no node has room."""

    PENDING = PoolCounts(target=5, ready=2, starting=3, pending=3, pending_s=61.0, reason="No node has room.")

    def ask(self, now_s, counts, state=None):
        return decide(observe(now_s, demand(40), prefill=counts, decode=8), state=state)

    def test_unavailable_places_are_given_up_reported_and_not_requested_repeatedly(self):
        given_up = self.ask(0.0, self.PENDING)
        prefill = given_up.pools[PREFILL]
        assert prefill.target == 2
        assert prefill.reason is Reason.UNPLACED
        assert "the next attempt is in 60 s" in prefill.texts[0]
        assert "No node has room." in prefill.texts
        state, asked_at = given_up.state, []
        for now_s in range(5, 600, 5):
            again = self.ask(float(now_s), PoolCounts(2, 2), state)
            state = again.state
            if again.pools[PREFILL].target > 2:
                assert again.pools[PREFILL].target == 3  # one, to try
                asked_at.append(now_s)
                pending = PoolCounts(3, 2, starting=1, pending=1, pending_s=61.0)
                state = self.ask(float(now_s), pending, state).state
        assert asked_at == [60, 180, 420]

    def test_places_are_awaited_until_the_timeout(self):
        waiting = PoolCounts(target=5, ready=2, starting=3, pending=3, pending_s=30.0)
        assert self.ask(0.0, waiting).pools[PREFILL].target >= 5

    def test_finding_a_place_ends_the_wait(self):
        given_up = self.ask(0.0, self.PENDING)
        more = self.ask(70.0, PoolCounts(3, 3), given_up.state)
        assert more.pools[PREFILL].target > 3

    def test_the_minimum_stays_requested(self):
        bounds = limits(pools={PREFILL: PoolLimits(5, 8), DECODE: PoolLimits(1, 8)})
        assert decide(observe(0.0, demand(40), self.PENDING, 8), bounds).pools[PREFILL].target >= 5


class TestRoleChange:
    def run_until_spare(self, **seen):
        """Six decode workers too many, for longer than the calm period; then prompts become long."""
        pools = Planned(limits(role_change=seen.pop("allowed", True)), prefill=2, decode=12)
        state = AutoscalerState()
        for now_s in range(0, 70, 5):
            state = plan(observe(float(now_s), demand(10), 2, 12), pools.limits, state).state
        return plan(observe(75.0, demand(10, prompt=3000), decode=12, **seen), pools.limits, state)

    def test_a_spare_worker_changes_role_if_a_new_one_would_be_later(self):
        counts = PoolCounts(2, 2, start_s=60.0)
        decided = self.run_until_spare(prefill=counts, role_change_obstacle="")
        assert decided.role_change is not None
        assert (decided.role_change.source, decided.role_change.destination) == (DECODE, PREFILL)
        assert decided.pools[DECODE].target == 11
        assert decided.pools[PREFILL].target == decided.pools[PREFILL].wanted
        assert "becomes a prefill worker" in decided.pools[PREFILL].texts[-1]

    @pytest.mark.parametrize(
        "seen",
        [
            {"prefill": PoolCounts(2, 2, start_s=0.5), "role_change_obstacle": ""},
            {"prefill": PoolCounts(2, 2, start_s=60.0), "role_change_obstacle": "other caches"},
            {"prefill": PoolCounts(2, 2, start_s=60.0), "role_change_obstacle": "", "allowed": False},
            {"prefill": PoolCounts(2, 2, start_s=60.0, pinned=True), "role_change_obstacle": ""},
        ],
        ids=["a new one is quicker", "impossible", "switched off", "set by hand"],
    )
    def test_without_a_need_no_worker_changes_role(self, seen):
        assert self.run_until_spare(**seen).role_change is None

    def test_a_role_change_replaces_a_worker_without_a_place(self):
        counts = PoolCounts(4, 2, starting=2, pending=2, pending_s=90.0)
        decided = self.run_until_spare(prefill=counts, role_change_obstacle="")
        assert decided.role_change is not None
        assert decided.role_change.start_s is None
        assert decided.pools[PREFILL].target == 3
        assert decided.pools[DECODE].target == 11


def test_an_unservable_class_does_not_start_all_workers():
    slow = FormulaCosts(fixed=400.0)  # a step takes longer than interactive's time per token
    decided = decide(observe(0.0, demand(0.5, prompt=9000), costs=slow))
    assert decided.pools[DECODE].target < 10
    assert decided.pools[PREFILL].target < 10
    assert any("even on an idle worker" in text for text in decided.pools[DECODE].texts)


def test_the_plan_reports_the_attainment_where_more_workers_help():
    """Otherwise the reader sees 0 % for a pool that does not change."""
    slow = FormulaCosts(fixed=70.0)
    both = Demand(demand(0.2).classes + demand(0.2, slo=BATCH).classes, 1000)
    [text, *_] = decide(observe(0.0, both, costs=slow)).pools[DECODE].texts
    assert "predicted to meet TPOT: 0 %, 100 % where more workers help." in text


def test_less_urgent_classes_need_fewer_workers():
    targets = [decide(observe(0.0, demand(300, slo=slo))).pools for slo in (INTERACTIVE, STANDARD, BATCH)]
    for pool in POOLS:
        sizes = [pools[pool].target for pools in targets]
        assert sizes == sorted(sizes, reverse=True)
    assert targets[0][DECODE].target > targets[2][DECODE].target


def test_speculation_needs_fewer_decode_workers():
    plain, drafting = FormulaCosts(), FormulaCosts(rounds=2.0, per_sequence=0.3)
    sizes = [decide(observe(0.0, demand(40), costs=costs)).pools[DECODE].target for costs in (plain, drafting)]
    assert sizes[1] < sizes[0]


def test_the_sentence_contains_the_numbers():
    decided = decide(observe(0.0, demand(20), prefill=2, decode=2))
    prefill, decode = (decided.pools[name].texts[0] for name in (PREFILL, DECODE))
    assert prefill.startswith(f"prefill 2 → {decided.pools[PREFILL].target}: 20 requests/s × 10")
    assert " % of the capacity of 2 workers; predicted to meet TTFT: " in prefill
    assert "concurrent sequences; a worker meets the targets with up to 99" in decode
    assert ", all for which" not in decode
    assert json.loads(json.dumps(decided.to_dict()))["pools"]["prefill"]["direction"] == "up"


@pytest.mark.parametrize(
    ("limit", "room"), [({"max_num_seqs": 1}, "decode.max_num_seqs"), ({"kv_tokens": 3000}, "the KV cache")]
)
def test_the_sentence_names_what_has_no_room(limit, room):
    [text, *_] = decide(observe(0.0, demand(5), costs=FormulaCosts(**limit))).pools[DECODE].texts
    assert f", all for which {room} has room; the load is" in text


@given(RATES, PROMPTS, OUTPUTS, st.integers(1, 30), st.floats(0, 500), st.floats(-50, 50))
def test_every_plan_has_a_sentence(rate, prompt, output, size, load, growth):
    observation = observe(0.0, demand(rate, prompt, output), size, size, COSTS, load, load, growth)
    for name, pool in decide(observation).pools.items():
        assert pool.texts[0].startswith(name)
        assert all(text and "e+" not in text and "nan" not in text for text in pool.texts)
