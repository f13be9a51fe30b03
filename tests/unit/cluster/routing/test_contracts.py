"""The contract of filters, scorers and pickers, for any workers and requests."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.routing.filters import FILTERS
from cluster.routing.pickers import PICKERS
from cluster.routing.routing_contracts import Candidates, RoutingRequest, WorkerSnapshot
from cluster.routing.scorers import SCORERS
from tests.unit.cluster.routing.worlds import decode_pools, make_candidates, prefill_pools, requests, shuffled

Workers = Sequence[WorkerSnapshot]
some_of_them = settings(max_examples=40)
"""One case for each of many names, the same in every run."""


def names(candidates: Candidates, index: int) -> tuple[str | None, str]:
    route = candidates.route(index)
    return (route.prefill.worker_id if route.prefill is not None else None), route.decode.worker_id


def arrays(candidates: Candidates) -> list[np.ndarray]:
    forecasts = [getattr(candidates.forecasts, name) for name in candidates.forecasts.__slots__]
    return [candidates.prefill, candidates.decode, *(value for value in forecasts if isinstance(value, np.ndarray))]


@pytest.mark.parametrize("name", FILTERS)
@some_of_them
@given(workers=decode_pools, request=requests, failed=st.sets(st.sampled_from(["decode-0", "decode-1", "decode-2"])))
def test_filters_return_a_subset_of_workers_in_order(
    name: str, workers: Workers, request: RoutingRequest, failed: set[str]
) -> None:
    request = RoutingRequest("r", request.num_prompt_tokens, frozenset(failed))
    before = list(workers)
    kept = FILTERS[name]().filter(workers, request)
    assert workers == before
    assert kept == [worker for worker in workers if worker in kept]
    if name != "accepting":
        assert kept, "only workers that take nothing may be left out to the last"


@pytest.mark.parametrize("name", SCORERS)
@some_of_them
@given(prefill=prefill_pools, decode=decode_pools, request=requests)
def test_every_route_gets_a_score_between_0_and_1(
    name: str, prefill: Workers, decode: Workers, request: RoutingRequest
) -> None:
    candidates = make_candidates(prefill, decode, request)
    before = copy.deepcopy(arrays(candidates))
    scores = SCORERS[name]().score(candidates)
    assert scores.shape == (len(candidates),)
    assert np.all((scores >= 0) & (scores <= 1))
    assert all(np.array_equal(old, new, equal_nan=True) for old, new in zip(before, arrays(candidates), strict=True))


@pytest.mark.parametrize("name", SCORERS)
@some_of_them
@given(prefill=prefill_pools, decode=decode_pools, request=requests, seed=st.integers(0, 9))
def test_the_order_of_workers_does_not_change_scores(
    name: str, prefill: Workers, decode: Workers, request: RoutingRequest, seed: int
) -> None:
    found = []
    for candidates in (
        make_candidates(prefill, decode, request),
        make_candidates(shuffled(prefill, seed), shuffled(decode, seed), request),
    ):
        scores = SCORERS[name]().score(candidates)
        found.append({names(candidates, index): float(score) for index, score in enumerate(scores)})
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("name", PICKERS)
@some_of_them
@given(prefill=prefill_pools, decode=decode_pools, seed=st.integers(0, 9), data=st.data())
def test_pickers_return_one_of_the_routes(
    name: str, prefill: Workers, decode: Workers, seed: int, data: st.DataObject
) -> None:
    candidates = make_candidates(prefill, decode)
    count = len(candidates)
    scores = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=count, max_size=count)))
    among = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    before = scores.copy(), among.copy()
    picked = PICKERS[name](random.Random(seed)).pick(candidates, scores, among)
    assert picked in among
    assert np.array_equal(scores, before[0])
    assert np.array_equal(among, before[1])
    if name == "best_score":
        assert scores[picked] == scores[among].max()


@pytest.mark.parametrize("name", ["best_score", "round_robin"])
@some_of_them
@given(prefill=prefill_pools, decode=decode_pools, seed=st.integers(0, 9))
def test_deterministic_pickers_do_not_depend_on_the_order(
    name: str, prefill: Workers, decode: Workers, seed: int
) -> None:
    picked = set()
    for candidates in (
        make_candidates(prefill, decode),
        make_candidates(shuffled(prefill, seed), shuffled(decode, seed)),
    ):
        scores = SCORERS["least_loaded"]().score(candidates)
        among = np.arange(len(candidates))
        picked.add(names(candidates, PICKERS[name](random.Random(0)).pick(candidates, scores, among)))
    assert len(picked) == 1


@pytest.mark.parametrize("name", PICKERS)
def test_pickers_that_need_no_scores_do_not_read_them(name: str) -> None:
    picker = PICKERS[name](random.Random(0))
    other = PICKERS[name](random.Random(0))
    candidates = make_candidates([], _some_decode_workers())
    falling, rising = np.linspace(1.0, 0.0, len(candidates)), np.linspace(0.0, 1.0, len(candidates))
    among = np.arange(len(candidates))
    first = [picker.pick(candidates, falling, among) for _ in range(9)]
    same = first == [other.pick(candidates, rising, among) for _ in range(9)]
    assert same == (not picker.needs_scores)


def _some_decode_workers() -> list[WorkerSnapshot]:
    return [WorkerSnapshot(f"decode-{number}", "decode", True, 0, 0) for number in range(4)]
