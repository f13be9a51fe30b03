"""What work costs on the usual worker of a pool: its steps, and nothing that a forecast adds by itself."""

from __future__ import annotations

from math import isfinite
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.roles import DECODE, PREFILL
from baton.core.step_costs import StepSample
from cluster.autoscaling import tuning
from cluster.autoscaling.costs import ModelCosts, costs_of
from cluster.latency.feed import traits_of
from cluster.latency.latency_model import LatencyModel
from cluster.registry.workers import WorkerInfo
from tests.step_cost_reports import report_of
from tests.worker_infos import make_info

ratios = st.lists(st.floats(0.2, 5.0), max_size=30)
tokens = st.integers(1, 8000)
batches = st.integers(1, 64)


def worker(name: str, **changes: Any) -> WorkerInfo:
    return make_info(name, name.split("-")[0], **{"device": "cuda:0", "chunk_tokens": 512, **changes})


def model_of(*infos: WorkerInfo, slow: str = "") -> LatencyModel:
    """Steps of 5 ms and half a millisecond per prompt token; four times as much on one of them."""
    model = LatencyModel(lambda: 0.0)
    for info in infos:
        model.add_worker(info.worker_id, traits_of(info))
        factor = 4.0 if info.worker_id == slow else 1.0
        model.update_worker(info.worker_id, report_of(step(index, factor) for index in range(60)))
    return model


def step(index: int, factor: float) -> StepSample:
    values = dict.fromkeys(StepSample._fields, 0)
    if index % 2:
        values |= {"sequences": 1, "prompt_tokens": 20 * (index % 20 + 1)}
    else:
        batch = index % 16 + 1
        values |= {"sequences": batch, "decoding": batch, "context_tokens": 500 * batch}
    return StepSample(**{**values, "ms": factor * (5.0 + 0.5 * values["prompt_tokens"] + 0.2 * values["sequences"])})


def pair(*, contended: bool, model: LatencyModel | None = None) -> ModelCosts:
    info = worker("decode-1")
    return ModelCosts(model or model_of(info), info, ("prefill-1", "decode-1"), contended)


def figures(costs: ModelCosts, batch: int, num_tokens: int) -> list[float]:
    return [costs.prefill_ms(num_tokens, 0), costs.tpot_ms(batch, num_tokens), costs.plain_tpot_ms(batch, num_tokens)]


@given(ratios, ratios, batches, tokens)
def test_past_requests_do_not_make_workers_look_slower(
    alone: list[float], local: list[float], batch: int, num_tokens: int
) -> None:
    costs = pair(contended=False)
    before = figures(costs, batch, num_tokens)
    for calibration in (costs.model.ttft_calibration, costs.model.tpot_calibration):
        for is_local, found in ((False, alone), (True, local)):
            for ratio in found:
                calibration.of(contended=False, local=is_local).observe(10.0, 10.0 * ratio)
    assert figures(costs, batch, num_tokens) == pytest.approx(before)


@given(ratios, ratios, batches, tokens)
def test_contention_on_shared_processors_counts_once(
    ttft: list[float], tpot: list[float], batch: int, num_tokens: int
) -> None:
    model = pair(contended=False).model
    for calibration, found in ((model.ttft_calibration, ttft), (model.tpot_calibration, tpot)):
        for ratio in found:
            calibration.of(contended=True).observe(10.0, 10.0 * ratio)
    alone, shared = (figures(pair(contended=is_shared, model=model), batch, num_tokens) for is_shared in (False, True))
    lost = [own.of(contended=True).factor for own in (model.ttft_calibration, model.tpot_calibration)]
    assert shared == pytest.approx([alone[0] * lost[0], alone[1] * lost[1], alone[2] * lost[1]])


@given(batches, batches, tokens, tokens)
def test_more_work_never_costs_less(batch: int, other: int, num_tokens: int, others: int) -> None:
    costs = pair(contended=False)
    few, many = sorted([batch, other])
    short, long = sorted([num_tokens, others])
    assert costs.prefill_ms(short, 0) <= costs.prefill_ms(long, 0)
    assert costs.prefill_ms(short, 0) <= costs.prefill_ms(short, long)
    assert costs.tpot_ms(few, short) <= costs.tpot_ms(many, long) * (1 + 1e-9)
    assert costs.handoff_ms(short) <= costs.handoff_ms(long)
    assert all(value > 0 and isfinite(value) for value in figures(costs, batch, num_tokens))


def test_a_snapshot_matches_the_model() -> None:
    info = worker("decode-1")
    model = model_of(info)
    link = ("prefill-1", "decode-1")
    now, taken = (ModelCosts(own, info, link, True) for own in (model, model.snapshot(["decode-1"], link)))
    before = figures(now, 8, 300), now.handoff_ms(400), now.tokens_per_round(8), now.is_measured
    assert (figures(taken, 8, 300), taken.handoff_ms(400), taken.tokens_per_round(8), taken.is_measured) == before
    model.tpot_calibration.of(contended=True).observe(10.0, 30.0)
    model.update_worker("decode-1", report_of(step(index, 9.0) for index in range(300)))
    model.remove_worker("decode-1")
    assert figures(taken, 8, 300) == before[0]
    assert figures(now, 8, 300) != before[0]


def test_one_outlier_worker_changes_nothing() -> None:
    infos = [worker(f"prefill-{number}") for number in range(3)]
    usual, odd = model_of(*infos), model_of(*infos, slow="prefill-0")
    found = costs_of(odd, infos, [])
    assert set(found) == {PREFILL}
    assert found[PREFILL].info.worker_id != "prefill-0"
    assert found[PREFILL].prefill_ms(300, 0) == pytest.approx(
        costs_of(usual, infos, [])[PREFILL].prefill_ms(300, 0), rel=0.25
    )


def test_a_new_worker_is_not_typical() -> None:
    infos = [worker("decode-1"), worker("decode-2"), worker("decode-3")]
    model = model_of(infos[0])
    for info in infos[1:]:
        model.add_worker(info.worker_id, traits_of(info))
        model.update_worker(info.worker_id, report_of(step(index, 1.0) for index in range(tuning.MIN_STEP_SAMPLES - 1)))
    costs = costs_of(model, [], infos)[DECODE]
    assert (costs.info.worker_id, costs.is_measured) == ("decode-1", True)
    assert not costs_of(model, [], infos[1:])[DECODE].is_measured


@pytest.mark.parametrize(
    ("device", "nodes", "contended"),
    [("cpu", "aa", True), ("cpu", "ab", False), ("cuda:0", "aa", False)],
)
def test_cpu_workers_on_one_node_share_processors(device: str, nodes: str, contended: bool) -> None:
    infos = [worker(f"{pool}-1", device=device, node=node) for pool, node in zip((PREFILL, DECODE), nodes, strict=True)]
    found = costs_of(model_of(*infos), infos[:1], infos[1:])
    assert {costs.contended for costs in found.values()} == {contended}
    assert {costs.link for costs in found.values()} == {("prefill-1", "decode-1")}
