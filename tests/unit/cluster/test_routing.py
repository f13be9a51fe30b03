"""Filters, scorers, pickers, and the profile that joins them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.base import RoutingRequest, WorkerSnapshot
from cluster.routing.filters.accepting import Accepting
from cluster.routing.filters.untried import Untried
from cluster.routing.pickers.best_score import BestScore
from cluster.routing.profile import RoutingProfile, default_profile
from cluster.routing.scorers.least_loaded import LeastLoaded

REQUEST = RoutingRequest("r", 10)


def snapshot(worker_id: str, *, accepting: bool = True, in_flight: int = 0, assigned: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id, "decode", accepting, in_flight, assigned)


snapshots = st.lists(
    st.builds(
        WorkerSnapshot,
        st.sampled_from([f"w{number}" for number in range(8)]),
        st.just("decode"),
        st.booleans(),
        st.integers(0, 20),
        st.integers(0, 100),
    ),
    unique_by=lambda candidate: candidate.worker_id,
)


def test_those_that_accept_nothing_are_left_out():
    assert Accepting().filter([snapshot("a", accepting=False), snapshot("b")], REQUEST) == [snapshot("b")]


def test_those_that_failed_the_request_are_left_out_while_there_are_others():
    request = RoutingRequest("r", 10, frozenset({"a"}))
    assert Untried().filter([snapshot("a"), snapshot("b")], request) == [snapshot("b")]
    assert Untried().filter([snapshot("a")], request) == [snapshot("a")]
    assert Untried().filter([], request) == []


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=8))
def test_fewer_requests_score_higher_within_0_and_1(loads):
    candidates = [snapshot(str(index), in_flight=load) for index, load in enumerate(loads)]
    scores = LeastLoaded().score(candidates, REQUEST)
    assert all(0 <= score <= 1 for score in scores.values())
    for one in candidates:
        for other in candidates:
            assert (scores[one.worker_id] > scores[other.worker_id]) == (one.in_flight < other.in_flight)


def test_among_equals_the_one_with_the_fewest_so_far_is_picked():
    candidates = [snapshot("a", assigned=4), snapshot("b", assigned=3), snapshot("c", assigned=9)]
    assert BestScore().pick(candidates, {"a": 0.5, "b": 0.5, "c": 0.5}).worker_id == "b"
    assert BestScore().pick(candidates, {"a": 0.5, "b": 0.5, "c": 0.6}).worker_id == "c"


@given(snapshots)
def test_the_default_takes_a_least_loaded_worker_that_accepts(candidates):
    chosen = default_profile().select(candidates, REQUEST)
    accepting = [candidate for candidate in candidates if candidate.accepting]
    if not accepting:
        assert chosen is None
    else:
        assert chosen is not None
        assert chosen.accepting
        assert chosen.in_flight == min(candidate.in_flight for candidate in accepting)


@given(snapshots, st.sets(st.sampled_from([f"w{number}" for number in range(8)])))
def test_a_retry_avoids_workers_that_failed_it_if_it_can(candidates, failed):
    chosen = default_profile().select(candidates, RoutingRequest("r", 10, frozenset(failed)))
    others = {c.worker_id for c in candidates if c.accepting} - failed
    assert (chosen is not None) == any(c.accepting for c in candidates)
    if others:
        assert chosen is not None
        assert chosen.worker_id in others


@pytest.mark.parametrize(("weights", "winner"), [((1.0, 0.1), "idle"), ((0.1, 1.0), "liked")])
def test_weights_decide_between_scorers(weights, winner):
    class Likes:
        def score(self, candidates, request):
            return {candidate.worker_id: float(candidate.worker_id == "liked") for candidate in candidates}

    profile = RoutingProfile((), ((LeastLoaded(), weights[0]), (Likes(), weights[1])), BestScore())
    chosen = profile.select([snapshot("idle"), snapshot("liked", in_flight=3)], REQUEST)
    assert chosen is not None
    assert chosen.worker_id == winner
