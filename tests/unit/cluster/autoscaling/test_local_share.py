"""Both pools are sized together where decode workers may compute prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.roles import DECODE, PREFILL
from baton.core.slo import STANDARD
from cluster.autoscaling.autoscaler import AutoscalerState, plan
from cluster.autoscaling.decode_capacity import decode_forecast
from cluster.autoscaling.forecast import fewest_workers
from cluster.autoscaling.local_share import with_best_share
from cluster.autoscaling.observation import PoolCounts
from cluster.autoscaling.prefill_capacity import prefill_forecast
from cluster.autoscaling.scaling_limits import PoolLimits
from tests.unit.cluster.autoscaling.scenarios import COSTS, Planned, demand, limits, observe

LIMITS = limits(headroom=0.1)  # the loads below are near what that many workers bear
SHARES = [steps / 64 for steps in range(65)]


def asked(rate=20.0, seen_share=0.2, prompt=1000.0, output=50.0):
    """Kept by 1 + 3 workers with three quarters of the prompts local, by 3 + 1 with none."""
    return demand(rate, prompt, output, STANDARD).with_local_share(seen_share)


def needed(of, share):
    """Workers of both pools, with headroom."""
    shared = of.scaled(1 + LIMITS.headroom).with_local_share(share)
    away = shared.split()[0]
    prefill = fewest_workers(lambda size: prefill_forecast(away, COSTS, size, spills=share > 0), 1, 64)
    decode = fewest_workers(lambda size: decode_forecast(shared, COSTS, size), 1, 64)
    return prefill.workers, decode.workers


def test_the_local_share_minimizes_the_number_of_workers():
    of = asked(10, prompt=4000)
    sums = {share: sum(needed(of, share)) for share in SHARES}
    found = with_best_share(observe(0.0, of), LIMITS).local_share
    assert sums[found] == min(sums.values()) < min(sums[0.0], sums[1.0])


def test_without_local_prefill_in_the_router_none_is_planned():
    assert with_best_share(observe(0.0, asked(seen_share=0.01)), LIMITS).local_share == 0.0
    never = plan(observe(0.0, asked(seen_share=0.0)), LIMITS, AutoscalerState())
    assert tuple(pool.target for pool in never.pools.values()) == needed(asked(), 0.0)


def test_pools_that_meet_the_targets_are_not_rebuilt_for_another_share():
    apart, together = needed(asked(), 0.0), needed(asked(), 1.0)
    assert together[DECODE == "decode"] > apart[1]
    for prefill, decode in (apart, together):
        decided = plan(observe(0.0, asked(), prefill, decode), LIMITS, AutoscalerState())
        assert (decided.pools[PREFILL].target, decided.pools[DECODE].target) == (prefill, decode)


@pytest.mark.parametrize("rate", [6.0, 7.0])
def test_prompts_that_would_be_late_on_prefill_go_to_decode(rate):
    """One that is busy for more than half of the time is late with a long prompt now and then."""
    of = demand(rate, 1000.0, 50.0, replace(STANDARD, ttft_s=0.2))
    alone, spilling = (prefill_forecast(of, COSTS, 1, spills=spills) for spills in (False, True))
    assert alone.lowest_attainment < 0.9
    assert not alone.keeps
    assert spilling.utilisation == alone.utilisation > 0.6
    assert spilling.keeps
    assert spilling.lowest_attainment == 1.0


def test_a_nearly_saturated_prefill_worker_spills_too_much():
    of = demand(8.2, 1000.0, 50.0, replace(STANDARD, ttft_s=0.2))
    alone, spilling = (prefill_forecast(of, COSTS, 1, spills=spills) for spills in (False, True))
    assert alone == spilling
    assert 0.8 < alone.utilisation < 0.9
    assert not alone.keeps


def test_decode_workers_get_only_prompts_beyond_the_prefill_capacity():
    of = asked(24, prompt=2000)
    grown = of.scaled(1 + LIMITS.headroom)
    bounds = limits(headroom=LIMITS.headroom, pools={PREFILL: PoolLimits(2, 2), DECODE: PoolLimits(1, 64)})
    share = with_best_share(observe(0.0, of, 2, 12), bounds).local_share
    keeps = [
        prefill_forecast(grown.with_local_share(left).split()[0], COSTS, 2, spills=True).keeps
        for left in (share, share - 1 / 64)
    ]
    assert keeps == [True, False]


def test_spare_workers_of_both_pools_are_removed_until_the_rest_is_needed():
    pools = Planned(LIMITS, prefill=12, decode=12)
    pools.run(900, asked())
    sizes = (pools.sizes[PREFILL], pools.sizes[DECODE])
    assert sum(sizes) == min(sum(needed(asked(), share)) for share in SHARES)
    settled = len(pools.changes)
    pools.run(900, asked())
    assert len(pools.changes) == settled


def test_a_pool_of_manual_size_is_planned_as_it_is():
    observation = observe(0.0, asked(), 1, PoolCounts(2, 2, pinned=True))
    decided = plan(observation, LIMITS, AutoscalerState())
    assert decided.pools[DECODE].target == 2
    assert (decided.pools[PREFILL].target, 2) == needed(asked(), 0.5)


def test_the_plan_states_its_local_share():
    shared, apart = (
        plan(observe(0.0, asked(seen_share=seen), 1, 3), LIMITS, AutoscalerState()).pools[PREFILL].texts
        for seen in (0.3, 0.0)
    )
    assert any("% of the prompt tokens on decode workers" in text for text in shared)
    assert not any("computed by decode workers" in text for text in apart)


def test_a_swing_is_followed_in_one_step():
    pools = Planned(LIMITS)
    pools.run(120, asked(5))
    pools.step(asked(80))
    after = dict(pools.sizes)
    pools.run(20, asked(80))
    assert pools.sizes == after
    assert sum(after.values()) > 8


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_prompts_on_decode_workers_have_ttft_targets(share):
    """Few long answers leave time for tokens, but not for a queue of long prompts."""
    hasty = replace(STANDARD, ttft_s=0.9, tpot_s=1.0)
    few = demand(2.0, 6000, 20, hasty).with_local_share(share)
    patient = demand(2.0, 6000, 20, replace(hasty, ttft_s=60.0)).with_local_share(share)
    patient_kept = decode_forecast(patient, COSTS, 2).lowest_attainment
    assert decode_forecast(patient, COSTS, 2).keeps
    late = decode_forecast(few, COSTS, 2)
    assert not late.keeps
    assert late.lowest_attainment < patient_kept
    assert decode_forecast(few, COSTS, 24).keeps


def test_prompts_wait_for_the_steps_of_decoding_sequences():
    alone = demand(1.0, 8000, 2, replace(STANDARD, ttft_s=2.0)).with_local_share(1.0)
    beside = replace(alone, classes=(*alone.classes, *demand(20.0, 1, 400, replace(STANDARD, name="other")).classes))
    kept = [decode_forecast(of, COSTS, 2).attainment[STANDARD.name] for of in (alone, beside)]
    assert kept[1] < kept[0]


def test_prompts_pay_for_a_step_only_without_decoding_sequences():
    """Prompts of 10 tokens take 9 ms alone, of which a step without tokens takes 8."""
    other = replace(STANDARD, name="other")
    prompts = demand(50.0, 10, 1, STANDARD).with_local_share(1.0)
    utilisation = {
        decoding: decode_forecast(
            replace(prompts, classes=(*prompts.classes, *demand(decoding, 1, 400, other).classes)), COSTS, 1
        ).utilisation
        for decoding in (0.001, 0.05, 1.0)
    }
    assert decode_forecast(prompts, COSTS, 1).utilisation == pytest.approx(0.45, rel=0.01)
    assert utilisation[0.001] == pytest.approx(0.45, rel=0.03)
    assert utilisation[0.05] < 0.9 * utilisation[0.001]
    assert utilisation[1.0] < 0.2


@pytest.mark.parametrize("output", [2.0, 50.0])
def test_more_load_than_the_maximum_uses_all_allowed_workers(output):
    """The way with the fewest workers to start is no answer where no way keeps the targets."""
    bounds = limits(pools={PREFILL: PoolLimits(1, 8), DECODE: PoolLimits(1, 8)})
    overload = asked(2000.0, seen_share=1.0, output=output)
    decided = plan(observe(0.0, overload, 1, 1), bounds, AutoscalerState())
    assert {pool.target for pool in decided.pools.values()} == {8}


def test_answers_of_one_token_have_prompts_with_targets():
    """They need no decoding, alone or among others that do."""
    other = replace(STANDARD, name="other")
    few, many = (demand(rate, 1000, 1, STANDARD).with_local_share(1.0) for rate in (1.0, 40.0))
    assert decode_forecast(few, COSTS, 2).keeps
    assert not decode_forecast(many, COSTS, 2).keeps
    for prompts in (few, many):
        beside = replace(prompts, classes=(*prompts.classes, *demand(1.0, 1, 400, other).classes))
        kept = decode_forecast(beside, COSTS, 2).attainment
        assert set(kept) == {STANDARD.name, "other"}
        assert (kept[STANDARD.name] > 0.9) == (prompts is few)


def test_prompts_that_no_decode_worker_computes_in_time_are_reported():
    slow = demand(0.1, 60_000, 20, STANDARD).with_local_share(1.0)
    assert decode_forecast(slow, COSTS, 2).hopeless == (STANDARD.name,)


def test_short_requests_do_not_free_room_for_long_ones():
    """A cache of 20,000 tokens has ten seats for the long ones, however many short ones come in between."""
    costs = replace(COSTS, kv_tokens=20_000)
    long = demand(0.3, 1000, 1000, STANDARD)
    short = demand(300.0, 10, 2, replace(STANDARD, name="short"))
    both = replace(long, classes=(*long.classes, *short.classes))
    assert decode_forecast(both, costs, 4).per_worker < 2 * decode_forecast(long, costs, 4).per_worker
