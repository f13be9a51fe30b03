"""The latency model against workers whose costs are known."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.speculation_rates import RateSums, SpeculationRates
from baton.core.step_costs import STEP_PRIOR, StepCostReport, StepCosts, StepSample
from cluster.latency.cost_table import attention_pairs
from cluster.latency.estimates import PromptQueue, WorkerTraits
from cluster.latency.latency_model import LatencyModel
from tests.fake_clock import FakeClock
from tests.step_cost_reports import report_of
from tests.unit.cluster.latency.synthetic_workers import COEFFICIENTS, SyntheticWorker, exact_ms

TRAITS = WorkerTraits(("decode", "cpu"), chunk_tokens=512)


def learn(model: LatencyModel, clock: FakeClock, workers: dict[str, SyntheticWorker], seconds: int = 40) -> None:
    for worker_id in workers:
        model.add_worker(worker_id, TRAITS)
    for _ in range(seconds):
        clock.now_s += 1
        for worker_id, worker in workers.items():
            model.update_worker(worker_id, worker.run(worker.steps(10), clock.now_s))


def median_error(model: LatencyModel, worker_id: str, scale: float = 1.0) -> float:
    """Over prompts and decode steps, half of each."""
    exact = SyntheticWorker(noise=0.0, seed=99)
    errors = []
    for _ in range(100):
        prompt, decode = exact.prompt_step(), exact.decode_step()
        if prompt.sequences == 1:
            count = prompt.prompt_tokens
            context = (prompt.attention_pairs - count * (count + 1) // 2) // count
            errors.append(model.prefill_ms(worker_id, count, context).ms / exact_ms(prompt, scale) - 1)
        step = model.step_ms(worker_id, decode.decoding, decode.context_tokens, decode.drafted_tokens)
        errors.append(step.ms / exact_ms(decode, scale) - 1)
    return statistics.median(map(abs, errors))


@pytest.mark.parametrize("outliers", [0.0, 0.02])
def test_known_costs_are_found_despite_noise_and_outliers(outliers: float) -> None:
    clock = FakeClock()
    model = LatencyModel(clock)
    learn(model, clock, {"w": SyntheticWorker(outliers=outliers)})
    assert median_error(model, "w") < 0.08


def test_the_quadratic_term_is_found() -> None:
    clock = FakeClock()
    model = LatencyModel(clock)
    learn(model, clock, {"w": SyntheticWorker(noise=0.02)}, seconds=100)
    with_context, without = model.prefill_ms("w", 512, 16_384).ms, model.prefill_ms("w", 512).ms
    assert (with_context - without) / (512 * 16_384) == pytest.approx(COEFFICIENTS[2], rel=0.25)


def test_few_samples_give_a_rough_estimate() -> None:
    clock = FakeClock()
    model = LatencyModel(clock)
    learn(model, clock, {"w": SyntheticWorker()}, seconds=2)
    assert median_error(model, "w") < 0.25


def test_a_new_worker_is_predicted_like_its_kind_and_a_slower_one_soon() -> None:
    clock = FakeClock()
    model = LatencyModel(clock)
    learn(model, clock, {"a": SyntheticWorker(), "b": SyntheticWorker(seed=2)})
    model.add_worker("new", TRAITS)
    assert median_error(model, "new") < 0.1
    slow = SyntheticWorker(scale=2.5, seed=3)
    model.update_worker("new", slow.run(slow.steps(20), clock.now_s))
    assert median_error(model, "new", scale=2.5) < 0.25
    assert median_error(model, "a") < 0.15  # the others hear little of it


def test_a_change_of_speed_is_tracked() -> None:
    clock = FakeClock()
    model, worker = LatencyModel(clock), SyntheticWorker()
    learn(model, clock, {"w": worker})
    worker.scale = 1.6
    learn(model, clock, {"w": worker})
    assert median_error(model, "w", scale=1.6) < 0.12


def test_common_samples_do_not_displace_rare_ones() -> None:
    clock = FakeClock()
    model, worker = LatencyModel(clock), SyntheticWorker()
    learn(model, clock, {"w": worker})
    for _ in range(300):
        clock.now_s += 1
        model.update_worker("w", worker.run([worker.decode_step() for _ in range(10)], clock.now_s))
    exact = StepSample(1, 500, attention_pairs(500, 0), 1, 0, 0, 0, 0)
    assert model.prefill_ms("w", 500).ms == pytest.approx(exact_ms(exact), rel=0.15)


def test_chunks_repeat_only_the_fixed_cost() -> None:
    model = LatencyModel()
    model.add_worker("small", WorkerTraits(("x",), chunk_tokens=100))
    model.add_worker("large", WorkerTraits(("x",), chunk_tokens=1000))
    one_token = model.prefill_ms("large", 2).ms - model.prefill_ms("large", 1).ms
    fixed = model.step_ms("large", 1, 0).ms
    small, large = model.prefill_ms("small", 1000).ms, model.prefill_ms("large", 1000).ms
    assert small - large == pytest.approx(9 * fixed)
    assert one_token > 0


def behind(model: LatencyModel, uncached_tokens: int, queue: PromptQueue) -> float:
    """Milliseconds until a prompt behind a queue is computed on the worker ``w``."""
    return float(model.prompt_costs(["w"], [uncached_tokens], [0], [queue]).ms[0])


def test_a_prompt_waits_for_the_remaining_queue_only() -> None:
    model = LatencyModel()
    model.add_worker("w", TRAITS)
    alone, full = model.prefill_ms("w", 100).ms, PromptQueue(400, attention_pairs(400, 0), 1)
    assert behind(model, 100, PromptQueue()) == pytest.approx(alone)
    waiting = behind(model, 100, full)
    assert waiting == pytest.approx(alone + model.prefill_ms("w", 400).ms)
    assert behind(model, 100, replace(full, elapsed_ms=50.0)) == pytest.approx(waiting - 50)
    stuck = replace(full, elapsed_ms=1e9)
    assert behind(model, 100, stuck) == pytest.approx(alone)


def test_decoding_sequences_take_their_share_of_the_budget() -> None:
    model = LatencyModel()
    model.add_worker("w", WorkerTraits(("x",), chunk_tokens=64))
    shared = behind(model, 64, PromptQueue(decoding=32, context_tokens=3200))
    assert shared > model.prefill_ms("w", 64).ms + model.step_ms("w", 32, 3200).ms


def test_a_target_of_decoding_sequences_spreads_a_prompt_over_more_steps() -> None:
    model = LatencyModel()
    model.add_worker("w", WorkerTraits(("x",), chunk_tokens=512))
    free, loose, strict = (
        behind(model, 1000, PromptQueue(decoding=4, context_tokens=2000, tpot_target_s=target_s))
        for target_s in (0.0, 0.2, 0.03)
    )
    assert free < loose < strict


def test_drafts_of_decoding_sequences_lengthen_the_steps_of_a_prompt() -> None:
    model = LatencyModel()
    beside = PromptQueue(decoding=2, context_tokens=400)
    model.add_worker("w", TRAITS)
    without = behind(model, 100, beside)
    rates = SpeculationRates()
    for _ in range(100):  # five drafted for each of the two
        rates.observe(2, 5, 10)
    model.update_worker("w", StepCostReport(STEP_PRIOR, 0.1, 100, rates))
    verifying = model.step_ms("w", 2, 400, 10).ms - model.step_ms("w", 2, 400).ms
    assert behind(model, 100, beside) - without == pytest.approx(verifying, rel=0.1)


def test_speculation_divides_the_time_per_token() -> None:
    model = LatencyModel()
    model.add_worker("w", TRAITS)
    model.update_worker("w", report_of([StepSample(30.0, 0, 0, 2, 2, 400, 4, 3)] * 100))
    assert model.tokens_per_round("w", 2) == pytest.approx(2.5, rel=0.1)
    assert model.predict_tpot("w", 2, 400).ms == pytest.approx(30 / 2.5, rel=0.1)
    with_handoff = model.predict_tpot("w", 2, 400, output_tokens=11, handoff_ms=100)
    assert with_handoff.ms == pytest.approx(model.predict_tpot("w", 2, 400).ms + 10)


def test_links_are_learned_separately() -> None:
    clock = FakeClock()
    model = LatencyModel(clock)
    for worker_id in ("p", "near", "far"):
        model.add_worker(worker_id, TRAITS)
    for _ in range(60):
        clock.now_s += 1
        for num_bytes in (100_000, 1_000_000, 10_000_000):
            model.observe_transfer(("p", "near"), num_bytes, 2 + num_bytes / 1e6)
            model.observe_transfer(("p", "far"), num_bytes, 2 + num_bytes / 1e5)
    assert model.transfer_ms(5_000_000, ("p", "near")).ms == pytest.approx(7, rel=0.2)
    assert model.transfer_ms(5_000_000, ("p", "far")).ms == pytest.approx(52, rel=0.2)
    assert model.transfer_ms(5_000_000, ("q", "new")).ms > 0


def test_links_of_removed_workers_are_not_kept() -> None:
    """Hand-offs are told of when decoding ends, which may be after their prefill worker has gone."""
    clock = FakeClock()
    model = LatencyModel(clock)
    model.add_worker("d", TRAITS)
    for number in range(50):
        model.add_worker(f"p{number}", TRAITS)
        model.remove_worker(f"p{number}")
        clock.now_s += 10
        model.observe_transfer((f"p{number}", "d"), 1000, 2.0)
    assert not model._links
    assert not model._transfers


def test_an_unknown_worker_has_a_prediction() -> None:
    assert LatencyModel().prefill_ms("who", 100).ms > 0


def test_uncertainty_shrinks_with_samples() -> None:
    clock = FakeClock()
    model = LatencyModel(clock)
    model.add_worker("w", TRAITS)
    before = model.step_ms("w", 4, 1000)
    learn(model, clock, {"w": SyntheticWorker(noise=0.05)})
    after = model.step_ms("w", 4, 1000)
    assert after.sd_ms / after.ms < 0.6 * before.sd_ms / before.ms


def test_predictions_of_many_candidates_match_single_ones() -> None:
    clock = FakeClock()
    model = LatencyModel(clock)
    learn(model, clock, {"a": SyntheticWorker(), "b": SyntheticWorker(scale=2, seed=2)}, seconds=5)
    ids = ["a", "b", "a", "who", "a"]
    queues = [
        PromptQueue(),
        PromptQueue(900, 9000, 3, 12.0, 5, 2500),
        PromptQueue(10, 55, 1),
        PromptQueue(decoding=3),
        PromptQueue(100, 5050, 1, 0.0, 3, 900, tpot_target_s=0.04),
    ]
    uncached, cached = [30, 700, 1500, 40, 700], [0, 64, 16, 0, 64]
    many = model.prompt_costs(ids, uncached, cached, queues).ms
    one = [
        model.prompt_costs(*([value] for value in row)).ms[0] for row in zip(ids, uncached, cached, queues, strict=True)
    ]
    assert many == pytest.approx(np.array(one))
    batches, contexts = [1, 4, 16, 2, 8], [100, 900, 9000, 50, 800]
    many = model.token_ms(ids, batches, contexts)
    one = [model.predict_tpot(*values).ms for values in zip(ids, batches, contexts, strict=True)]
    assert many == pytest.approx(np.array(one))


COUNTS = st.one_of(st.integers(-3, 10**6), st.integers(0, 2**64))
TIMES = st.one_of(
    st.floats(), st.floats(0, 1e5), st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300])
)
ANY_SAMPLE = st.builds(StepSample, TIMES, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e4), st.lists(ANY_SAMPLE, max_size=20)), max_size=6))
def test_no_sample_breaks_the_model(rounds: list[tuple[float, list[StepSample]]]) -> None:
    clock = FakeClock()
    model = LatencyModel(clock)
    model.add_worker("w", TRAITS)
    model.add_worker("v", TRAITS)
    worker = SyntheticWorker()
    for pause_s, samples in rounds:
        clock.now_s += pause_s
        model.update_worker("w", worker.run(samples, clock.now_s))
        model.observe_transfer(("w", "v"), samples[0].attention_pairs if samples else 0, pause_s)
    estimates = (
        model.prefill_ms("w", 100, 10),
        model.step_ms("w", 4, 1000, 3),
        model.transfer_ms(10**6, ("w", "v")),
        model.predict_tpot("w", 4, 1000),
    )
    for estimate in estimates:
        assert np.isfinite(estimate.ms)
        assert estimate.ms >= 0
        assert np.isfinite(estimate.sd_ms)
    assert model.tokens_per_round("w", 4) >= 1


@settings(max_examples=15, deadline=None)
@given(st.lists(ANY_SAMPLE.filter(lambda sample: not 1e-3 < sample.ms < 3.6e6), min_size=1, max_size=30))
def test_impossible_samples_change_nothing(samples: list[StepSample]) -> None:
    clock = FakeClock()
    model, worker = LatencyModel(clock), SyntheticWorker()
    learn(model, clock, {"w": worker}, seconds=3)
    before = model.step_ms("w", 4, 1000, 3)
    model.update_worker("w", worker.run(samples, clock.now_s))
    assert model.step_ms("w", 4, 1000, 3) == before


GOOD = StepCostReport(StepCosts(9.0, 0.4, 1e-4, 0.3, 5e-4, 0.2), 0.1, 500, SpeculationRates())
BAD = GOOD._replace(num_samples=600)


@pytest.mark.parametrize(
    "report",
    [
        BAD._replace(costs=GOOD.costs._replace(fixed=float("nan"))),
        BAD._replace(costs=GOOD.costs._replace(per_sequence=-1.0)),
        BAD._replace(costs=StepCosts(0, 0, 0, 0, 0)),
        BAD._replace(sd=float("inf")),
        BAD._replace(rates=SpeculationRates({0: RateSums(5.0, 3.0, 9.0)})),
    ],
)
def test_an_impossible_report_is_ignored(report: StepCostReport) -> None:
    model = LatencyModel()
    model.add_worker("w", TRAITS)
    model.update_worker("w", GOOD)
    before = model.step_ms("w", 4, 1000, 3), model.tokens_per_round("w", 4)
    model.update_worker("w", report)
    assert (model.step_ms("w", 4, 1000, 3), model.tokens_per_round("w", 4)) == before


@pytest.mark.parametrize("num_before", [10, 300])
def test_a_step_delayed_by_compilation_changes_no_prediction(num_before: int) -> None:
    samples = SyntheticWorker(scale=0.1).steps(num_before + 20)
    models = LatencyModel(), LatencyModel()
    compiled = samples[num_before]._replace(ms=2000.0)
    for model, steps in zip(models, ([*samples[:num_before], compiled, *samples[num_before:]], samples), strict=True):
        model.add_worker("w", TRAITS)
        model.update_worker("w", report_of(steps))
    for predict in (lambda model: model.prefill_ms("w", 300, 100), lambda model: model.step_ms("w", 4, 1000)):
        assert predict(models[0]) == predict(models[1])


def test_a_much_slower_worker_is_tracked() -> None:
    clock = FakeClock()
    model, worker = LatencyModel(clock), SyntheticWorker()
    learn(model, clock, {"w": worker}, seconds=10)
    worker.scale = 15.0
    learn(model, clock, {"w": worker}, seconds=60)
    assert median_error(model, "w", scale=15.0) < 0.15
