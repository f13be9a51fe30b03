"""The preferences of single filters, scorers and pickers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from baton.core.slo import BATCH, INTERACTIVE
from cluster.routing.filters import Accepting, HasRoom, Untried
from cluster.routing.pickers import BestScore, PowerOfTwo, RoundRobin
from cluster.routing.routing_contracts import RoutingRequest
from cluster.routing.routing_profile import LocalPrefill, Scan, count_routes, routes
from cluster.routing.scorers import SCORERS, probability_below
from tests.unit.cluster.routing.worlds import REQUEST, decode_worker, make_candidates, prefill_worker, queue


def test_workers_that_accept_nothing_are_left_out() -> None:
    assert Accepting().filter([decode_worker(0, accepting=False), decode_worker(1)], REQUEST) == [decode_worker(1)]


def test_workers_that_failed_the_request_are_left_out_if_there_are_others() -> None:
    request = RoutingRequest("r", 10, frozenset({"decode-0"}))
    assert Untried().filter([decode_worker(0), decode_worker(1)], request) == [decode_worker(1)]
    assert Untried().filter([decode_worker(0)], request) == [decode_worker(0)]
    assert Untried().filter([], request) == []


def test_workers_without_room_are_left_out_if_there_are_others() -> None:
    full = decode_worker(0, kv_tokens=1000, context_tokens=1000 - 400 - 64 + 1)
    seated = decode_worker(1, batch=64, max_num_seqs=64)
    unknown = decode_worker(2, context_tokens=10**6)
    roomy = decode_worker(3, kv_tokens=1000, context_tokens=1000 - 400 - 64)
    assert HasRoom().filter([full, seated, unknown, roomy], REQUEST) == [unknown, roomy]
    assert HasRoom().filter([full, seated], REQUEST) == [full, seated]


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [
        ("least_loaded", {}, {"in_flight": 1}),
        ("queue_depth", {}, {"queue": queue(100)}),
        ("prefix_affinity", {"cached_tokens": 100}, {"cached_tokens": 50}),
        ("predicted_ttft", {}, {"queue": queue(1000)}),
        ("predicted_ttft", {"cached_tokens": 300}, {}),
        ("slo_headroom", {}, {"queue": queue(100_000)}),
    ],
)
def test_the_better_prefill_worker_scores_higher(
    name: str, better: dict[str, object], worse: dict[str, object]
) -> None:
    candidates = make_candidates(
        [prefill_worker(0, **worse), prefill_worker(1, **better)], [decode_worker()], local=LocalPrefill.NEVER
    )
    lower, higher = SCORERS[name]().score(candidates)
    assert higher > lower


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [
        ("least_loaded", {}, {"in_flight": 1}),
        ("kv_use", {"kv_tokens": 4000}, {"kv_tokens": 2000}),
        ("kv_use", {"batch": 1}, {"batch": 2}),
        ("predicted_tpot", {}, {"batch": 20, "context_tokens": 20_000}),
        ("predicted_tpot", {}, {"backlog_tokens": 2000}),
        ("predicted_tpot", {"cached_tokens": 300}, {}),
        ("slo_headroom", {}, {"batch": 300, "context_tokens": 300_000}),
        ("slo_headroom", {"batch": 9, "tpot_target_s": 0.5}, {"batch": 9, "tpot_target_s": 0.005}),
    ],
)
def test_the_better_decode_worker_scores_higher(name: str, better: dict[str, object], worse: dict[str, object]) -> None:
    candidates = make_candidates(
        [prefill_worker()], [decode_worker(0, **worse), decode_worker(1, **better)], local=LocalPrefill.NEVER
    )
    lower, higher = SCORERS[name]().score(candidates)
    assert higher > lower


def test_headroom_is_relative_to_the_targets() -> None:
    slow = [prefill_worker(0, queue=queue(20_000))]
    scores = [
        float(SCORERS["slo_headroom"]().score(make_candidates(slow, [decode_worker()], replace(REQUEST, slo=slo)))[0])
        for slo in (INTERACTIVE, BATCH)
    ]
    assert scores[0] < 0.1
    assert scores[1] > 0.9


def test_probabilities_match_the_normal_distribution() -> None:
    means, sds = np.array([50.0, 100.0, 150.0, 1e9]), np.array([10.0, 10.0, 0.0, 1.0])
    assert probability_below(100.0, means, sds) == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=1e-3)
    assert probability_below(np.inf, means, sds) == pytest.approx(1.0)
    normal = [0.6915, 0.8413, 0.9772]
    assert probability_below(np.array([0.5, 1.0, 2.0]), np.zeros(3), np.ones(3)) == pytest.approx(normal, abs=0.011)


def test_ties_are_broken_by_the_fewest_requests_so_far() -> None:
    prefill = [prefill_worker(0, assigned=4), prefill_worker(1, assigned=3)]
    decode = [decode_worker(0, assigned=2), decode_worker(1, assigned=9)]
    candidates = make_candidates(prefill, decode, local=LocalPrefill.NEVER)
    every = np.arange(4)
    route = candidates.route(BestScore().pick(candidates, np.full(4, 0.5), every))
    assert (route.prefill, route.decode) == (prefill[1], decode[0])
    scores = np.array([0.5, 0.51, 0.5, 0.5])
    assert BestScore().pick(candidates, scores, every) == 1
    assert BestScore().pick(candidates, scores, np.array([0, 3])) == 0


def test_power_of_two_picks_the_better_of_a_random_pair() -> None:
    candidates = make_candidates([], [decode_worker(number) for number in range(4)])
    picker, scores = PowerOfTwo(random.Random(1)), np.array([0.1, 0.2, 0.3, 0.4])
    picked = Counter(picker.pick(candidates, scores, np.arange(4)) for _ in range(600))
    # Of the six pairs of routes, none, one, two and three have this one as their best.
    assert [round(picked[index] / 100) for index in range(4)] == [0, 1, 2, 3]


def test_round_robin_picks_the_worker_that_waited_longest() -> None:
    prefill = [prefill_worker(number, last_assigned_s=-number) for number in range(3)]
    decode = [decode_worker(0, last_assigned_s=5.0), decode_worker(1, last_assigned_s=4.0)]
    candidates = make_candidates(prefill, decode)
    count = len(candidates)
    route = candidates.route(RoundRobin().pick(candidates, np.zeros(count), np.arange(count)))
    assert (route.prefill, route.decode) == (prefill[2], decode[1])
    alone = make_candidates([], decode)
    assert alone.route(RoundRobin().pick(alone, np.zeros(2), np.arange(2))).decode == decode[1]


@pytest.mark.parametrize(("local", "expected"), [("auto", 8), ("never", 6), ("always", 2)])
def test_every_route_is_generated_once(local: str, expected: int) -> None:
    prefill, decode = routes(3, 2, LocalPrefill(local))
    assert len(set(zip(prefill.tolist(), decode.tolist(), strict=True))) == len(prefill) == expected
    assert count_routes(3, 2, LocalPrefill(local)) == expected


def test_beyond_the_limit_workers_are_sampled_including_those_that_hold_the_prompt() -> None:
    prefill = [prefill_worker(number, cached_tokens=90 if number == 17 else 0) for number in range(40)]
    decode = [decode_worker(number) for number in range(5)]
    scan = Scan(limit=100, sample=8, rng=random.Random(0))
    seen: set[str] = set()
    for _ in range(50):
        some, all_of_them = scan.narrow(prefill, decode)
        assert len(some) == len({worker.worker_id for worker in some}) == 8
        assert "prefill-17" in {worker.worker_id for worker in some}
        assert all_of_them == decode
        seen |= {worker.worker_id for worker in some}
    assert len(seen) == 40
    assert scan.narrow(prefill[:20], decode) == (prefill[:20], decode)
