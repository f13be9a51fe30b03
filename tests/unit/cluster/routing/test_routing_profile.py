"""Decisions of whole profiles: jointly, with local prefill where it pays, and with reasons in the record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.latency.estimates import WorkerTraits
from cluster.latency.latency_model import LatencyModel
from cluster.routing.routing_contracts import RouteDecision, RoutingRequest, WorkerSnapshot
from tests.unit.cluster.routing.worlds import (
    REQUEST,
    choose,
    decode_pools,
    decode_worker,
    make_candidates,
    prefill_pools,
    prefill_worker,
    profile,
    queue,
    requests,
)

Workers = Sequence[WorkerSnapshot]
BUSY: dict[str, Any] = {"batch": 30, "context_tokens": 30_000}


def chosen_ids(decision: RouteDecision | None) -> tuple[str | None, str]:
    assert decision is not None
    return decision.prefill_id, decision.decode_id


def model_with_dear_links() -> LatencyModel:
    model = LatencyModel(lambda: 0.0)
    for worker_id in ("prefill-0", "decode-0"):
        model.add_worker(worker_id, WorkerTraits((worker_id,), 512))
    for _ in range(50):
        model.observe_transfer(("prefill-0", "decode-0"), 16_000_000, 4000.0)
        model._transfer_fit_due_s = float("-inf")
    return model


@given(prefill=prefill_pools, decode=decode_pools, request=requests)
def test_only_accepting_workers_get_requests(prefill: Workers, decode: Workers, request: RoutingRequest) -> None:
    accepting = {worker.worker_id for worker in (*prefill, *decode) if worker.accepting}
    decision = choose(prefill, decode, request)
    assert (decision is None) == (not any(worker.accepting for worker in decode))
    if decision is not None:
        assert {decision.decode_id, decision.prefill_id or decision.decode_id} <= accepting
        assert 0 <= decision.cached_tokens < request.num_prompt_tokens
        assert decision.ttft_ms >= request.elapsed_ms
        assert decision.wait_ms <= decision.ttft_ms
        json.dumps(decision.record)
    never = choose(prefill, decode, request, local_prefill="never")
    both = any(worker.accepting for worker in prefill) and any(worker.accepting for worker in decode)
    assert (never is not None) == both
    assert never is None or never.prefill_id is not None
    resumed = choose(prefill, decode, replace(request, is_resumed=True), local_prefill="never")
    assert (resumed is None) == (decision is None)
    assert resumed is None or resumed.prefill_id is None


@given(prefill=prefill_pools, decode=decode_pools, failed=st.sets(st.sampled_from(["prefill-0", "decode-0"])))
def test_a_retry_avoids_workers_that_failed_it_if_possible(prefill: Workers, decode: Workers, failed: set[str]) -> None:
    decision = choose(prefill, decode, replace(REQUEST, failed_on=frozenset(failed)), filters=["accepting", "untried"])
    others = {worker.worker_id for worker in decode if worker.accepting} - failed
    if others:
        assert decision is not None
        assert decision.decode_id in others


def test_the_pair_is_scored_and_not_each_worker_separately() -> None:
    """The better decode worker has a very slow link from the only prefill worker."""
    model = model_with_dear_links()
    decode = [decode_worker(0), decode_worker(1, batch=2, context_tokens=800)]
    assert chosen_ids(choose([prefill_worker()], decode, model=model, local_prefill="never")) == (
        "prefill-0",
        "decode-1",
    )
    assert chosen_ids(choose([prefill_worker(1)], decode, model=model, local_prefill="never"))[1] == "decode-0"


def test_a_decode_worker_that_holds_the_prompt_saves_the_handoff() -> None:
    request = replace(REQUEST, num_prompt_tokens=4000)
    decode = [decode_worker(0, cached_tokens=3990), decode_worker(1)]
    decision = choose([prefill_worker()], decode, request, local_prefill="never")
    assert chosen_ids(decision)[1] == "decode-0"
    assert decision is not None
    by_decode = {candidate["decode"]: candidate["transfer_ms"] for candidate in decision.record["candidates"]}
    assert by_decode["decode-0"] < by_decode["decode-1"] / 2


class TestLocalPrefill:
    def test_a_short_prompt_is_computed_on_an_idle_decode_worker(self) -> None:
        decision = choose([prefill_worker()], [decode_worker()], replace(REQUEST, num_prompt_tokens=16))
        assert chosen_ids(decision) == (None, "decode-0")

    def test_a_busy_decode_worker_gets_a_handoff(self) -> None:
        decision = choose([prefill_worker()], [decode_worker(**BUSY)])
        assert chosen_ids(decision) == ("prefill-0", "decode-0")

    def test_a_prompt_cached_on_the_decode_worker_is_computed_there(self) -> None:
        request = replace(REQUEST, num_prompt_tokens=4000)
        busy, held = {"queue": queue(8000, 8)}, {"batch": 2, "context_tokens": 2000, "cached_tokens": 3990}
        decision = choose([prefill_worker(**busy)], [decode_worker(**held)], request)
        assert chosen_ids(decision) == (None, "decode-0")
        assert decision is not None
        assert decision.cached_tokens == 3990

    def test_a_prompt_is_computed_on_decode_if_the_handoff_takes_longer(self) -> None:
        few = {"batch": 2, "context_tokens": 800}
        cheap = choose([prefill_worker()], [decode_worker(**few)])
        dear = choose([prefill_worker()], [decode_worker(**few)], model=model_with_dear_links())
        assert chosen_ids(cheap) == ("prefill-0", "decode-0")
        assert chosen_ids(dear) == (None, "decode-0")

    def test_a_prompt_is_computed_on_decode_without_prefill_workers(self) -> None:
        decode = [decode_worker(**BUSY)]
        assert chosen_ids(choose([prefill_worker(accepting=False)], decode)) == (None, "decode-0")
        assert choose([prefill_worker(accepting=False)], decode, local_prefill="never") is None

    def test_always_computes_prompts_on_decode(self) -> None:
        decision = choose([prefill_worker()], [decode_worker(**BUSY)], local_prefill="always")
        assert chosen_ids(decision) == (None, "decode-0")


def test_other_sequences_have_typical_answers_left_however_short_this_one_is() -> None:
    few, many = (
        make_candidates([], [decode_worker(**BUSY)], replace(REQUEST, output_tokens=tokens)) for tokens in (1.0, 64.0)
    )
    assert few.forecasts.neighbour_tpot_ms == pytest.approx(many.forecasts.neighbour_tpot_ms, rel=0.01)


def test_a_conversation_stays_with_its_cached_prefix() -> None:
    prefill = [prefill_worker(0), prefill_worker(1, cached_tokens=380, queue=queue(50))]
    assert chosen_ids(choose(prefill, [decode_worker(batch=20)], local_prefill="never"))[0] == "prefill-1"
    prefill[1] = replace(prefill[1], queue=queue(50_000, 100))
    assert chosen_ids(choose(prefill, [decode_worker(batch=20)], local_prefill="never"))[0] == "prefill-0"


def test_idle_figures_exclude_the_load() -> None:
    loaded = choose(
        [prefill_worker(queue=queue(5000, 9))],
        [decode_worker(batch=9, context_tokens=9000)],
        replace(REQUEST, elapsed_ms=700.0),
        local_prefill="never",
    )
    idle = choose([prefill_worker()], [decode_worker()], local_prefill="never")
    assert loaded is not None
    assert idle is not None
    assert (loaded.idle_ttft_ms, loaded.idle_tpot_ms) == pytest.approx((idle.ttft_ms, idle.tpot_ms))
    assert loaded.ttft_ms == pytest.approx(700.0 + idle.ttft_ms + loaded.wait_ms)


def test_the_record_contains_the_scores_and_reasons() -> None:
    prefill = [prefill_worker(number, queue=queue(3000 * number, 3 * number)) for number in range(4)]
    decode = [decode_worker(number, batch=5) for number in range(4)]
    decision = choose(prefill, decode, local_prefill="never")
    assert decision is not None
    record = decision.record
    assert (record["num_routes"], record["num_weighed"]) == (16, 16)
    first, *others = record["candidates"]
    assert len(others) == 4
    assert first["chosen"]
    assert not any(candidate["chosen"] for candidate in others)
    assert first["ttft_ms"] == pytest.approx(decision.ttft_ms, abs=0.01)
    assert all(first["score"] >= candidate["score"] for candidate in others)
    weights = record["weights"]
    for candidate in record["candidates"]:
        assert set(candidate["scores"]) == set(weights)
        total = sum(weights[name] * score for name, score in candidate["scores"].items())
        assert candidate["score"] == pytest.approx(total, abs=2e-3)
    other = choose([prefill_worker(), prefill_worker(1, queue=queue(50_000, 9))], decode[:1], local_prefill="never")
    assert other is not None
    assert other.record["candidates"][1]["lost_on"] == "slo_headroom"


def test_preferred_routes_precede_better_ones() -> None:
    prefill = [prefill_worker(0, queue=queue(500, 2)), prefill_worker(1)]
    chooser = profile(local_prefill="never")

    def those(*wanted: bool) -> RouteDecision:
        limits = {"seats": np.array(wanted), "KV blocks": np.array(wanted), "TTFT target": np.array([True, True])}
        decision = chooser.choose(prefill, [decode_worker()], REQUEST, lambda candidates: limits)
        assert decision is not None
        return decision

    assert those(True, True).prefill_id == those(False, False).prefill_id == "prefill-1"
    other = those(True, False)
    assert other.prefill_id == "prefill-0"
    taken, passed_over = other.record["candidates"]
    assert taken["score"] < passed_over["score"]
    assert (taken.get("lost_on"), passed_over["lost_on"]) == (None, "room: seats, KV blocks")
    assert "room:" not in str(those(False, False).record)  # nothing had room, so it decided nothing


@pytest.mark.parametrize("context_tokens", [535, 536, 537])
def test_the_decision_reports_whether_a_slot_is_free(context_tokens: int) -> None:
    decision = choose([], [decode_worker(kv_tokens=1000, context_tokens=context_tokens)])
    assert decision is not None
    assert decision.has_capacity == (context_tokens + 400 + 64 <= 1000)


def test_the_chosen_route_is_in_the_record_even_if_it_is_not_among_the_best() -> None:
    prefill = [prefill_worker(number, queue=queue(1000 * number)) for number in range(4)]
    shown = Counter()
    chooser = profile(picker="power_of_two", local_prefill="never")
    for _ in range(40):
        decision = chooser.choose(prefill, [decode_worker(0), decode_worker(1)], REQUEST)
        assert decision is not None
        first = decision.record["candidates"][0]
        assert (first["prefill"], first["decode"]) == (decision.prefill_id, decision.decode_id)
        shown[len(decision.record["candidates"])] += 1
    assert shown[6] > 0


def test_scorers_are_timed_and_those_without_weight_do_not_run() -> None:
    times: dict[str, float] = {}
    chooser = profile(scorers={"slo_headroom": 0})
    chooser._observe, ticks = times.__setitem__, iter(np.arange(100.0))
    chooser._timer = lambda: float(next(ticks))
    chooser.choose([prefill_worker()], [decode_worker()], REQUEST)
    assert set(times) == {"predicted_ttft", "predicted_tpot", "prefix_affinity", "queue_depth", "kv_use"}
    assert set(times.values()) == {1.0}


def test_large_pools_are_sampled() -> None:
    decode = [decode_worker(number) for number in range(4)]
    decision = choose([prefill_worker(number) for number in range(4)], decode, scan_limit=10, sample=2)
    assert decision is not None
    assert (decision.record["num_routes"], decision.record["num_weighed"]) == (20, 6)


def test_round_robin_alternates() -> None:
    chooser = profile(picker="round_robin", local_prefill="never")
    prefill, decode = [prefill_worker(number) for number in range(2)], [decode_worker(number) for number in range(3)]
    seen = []
    for turn in range(6):
        decision = chooser.choose(prefill, decode, REQUEST)
        assert decision is not None
        assert decision.record["candidates"][0]["scores"] == {}
        seen.append((decision.prefill_id, decision.decode_id))
        taken = (decision.prefill_id, decision.decode_id)
        prefill, decode = (
            [replace(one, last_assigned_s=float(turn)) if one.worker_id in taken else one for one in workers]
            for workers in (prefill, decode)
        )
    assert len(set(seen)) == 6


@pytest.mark.parametrize("final_tokens", [535, 536, 537])
def test_a_free_slot_leaves_room_for_running_sequences_to_grow(final_tokens: int) -> None:
    decision = choose([], [decode_worker(kv_tokens=1000, context_tokens=100, final_tokens=final_tokens)])
    assert decision is not None
    assert decision.has_capacity == (final_tokens + 400 + 64 <= 1000)
