"""The checklist of a load test: what passes, what fails, and why."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from baton.bench.checklist import Verdict, checklist, drift_of
from baton.bench.runner import StageRun
from baton.bench.sample import UNFINISHED, Sample
from baton.bench.stage_result import StageResult, evaluate
from baton.bench.stages import Bounds, Stage


def sample(at_s: float, ttft_s: float, rng: random.Random, *, is_varied: bool = True) -> Sample:
    tokens = rng.randint(2, 30) if is_varied else 10
    found = Sample(at_s, False, tokens, tokens, sent_s=at_s, input_tokens=10 * tokens, output_tokens=tokens, error=None)
    found.chunk_times_s.extend(at_s + ttft_s + 0.001 * index for index in range(tokens))
    found.finished_s = found.chunk_times_s[-1]
    return found


def stage(count: int = 200, *, drift: float = 0.0, is_varied: bool = True, index: int = 0) -> StageResult:
    """A request every tenth of a second; the TTFT grows by ``drift`` over the stage."""
    rng = random.Random(index)
    run = StageRun(Stage(index, Bounds(), concurrency=index + 1))
    run.samples = [
        sample(n / 10, 0.1 * (1 + drift * n / count) * rng.uniform(0.8, 1.2), rng, is_varied=is_varied)
        for n in range(count)
    ]
    run.load_start_s, run.load_end_s = 0.0, count / 10
    return evaluate(run)


def queue(load: float, count: int = 60, seed: int = 0, decode_s: float = 1.0) -> StageResult:
    """An open loop on a server that computes one prompt after the other, of 1 s on average, and ``load`` of them come
    per second; decoding takes ``decode_s``, whatever else runs."""
    rng = random.Random(seed)
    run = StageRun(Stage(0, Bounds(), arrival="poisson", rate=load))
    due_s = free_s = 0.0
    for _ in range(count):
        due_s += rng.expovariate(load)
        free_s = max(due_s, free_s) + rng.uniform(0.1, 1.9)
        found = sample(due_s, free_s - due_s, rng)
        found.finished_s = free_s + decode_s
        run.samples.append(found)
    run.load_start_s, run.load_end_s = run.samples[0].intended_s, due_s
    return evaluate(run)


def verdicts(*stages: StageResult) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in checklist(stages)}


def reason(name: str, *stages: StageResult) -> str:
    return next(check.reason for check in checklist(stages) if check.name == name)


def test_a_good_run_passes_every_check():
    run = [stage(index=index) for index in range(3)]
    names = ["varied lengths", "stages", "tail latencies", "steady state"]
    assert verdicts(*run) == dict.fromkeys(names, Verdict.PASS)
    assert all(check.reason for check in checklist(run))


def test_a_short_run_has_notes_and_fails_nothing():
    """As the pages for new users have it: one level, few requests of equal lengths."""
    short = verdicts(stage(12, is_varied=False))
    assert set(short.values()) == {Verdict.NOTE}


def test_equal_lengths_are_noted():
    assert verdicts(stage(is_varied=False))["varied lengths"] == Verdict.NOTE
    assert "prompts vary by 0%" in reason("varied lengths", stage(is_varied=False))


def test_one_level_of_load_is_noted():
    assert reason("stages", stage()) == "1 level of load; give at least 3, such as --concurrency 1,4,16"
    assert next(check.verdict for check in checklist([stage()], num_levels=5) if check.name == "stages") == Verdict.PASS


def test_few_answers_have_no_tail():
    few = stage(60)
    assert verdicts(few)["tail latencies"] == Verdict.NOTE
    assert reason("tail latencies", stage(index=1), few) == "1 at once: 60 answers; a p99 needs 100"


def test_a_growing_queue_is_no_steady_state():
    growing = stage(drift=1.0)
    assert verdicts(growing)["steady state"] == Verdict.FAIL
    assert verdicts(growing, stage(30))["steady state"] == Verdict.FAIL
    assert "(Mann-Kendall)" in reason("steady state", growing)
    assert "drift test needs 40" in reason("steady state", stage(30))


@pytest.mark.parametrize("load", [2.0, 3.0, 6.0])
def test_an_overloaded_open_loop_fails_however_short_its_window_is(load):
    overloaded = queue(load)
    assert verdicts(overloaded)["steady state"] == Verdict.FAIL
    assert re.search(r"\d first tokens while the last \d\d requests came", reason("steady state", overloaded))


def test_an_open_loop_that_keeps_up_passes():
    assert verdicts(queue(0.3))["steady state"] == Verdict.PASS


def test_long_answers_are_no_queue():
    """Although no answer has ended when the last request comes."""
    assert verdicts(queue(0.3, decode_s=500.0))["steady state"] == Verdict.NOTE
    assert "unclear" not in reason("steady state", queue(0.3, decode_s=500.0))


def test_the_check_is_rarely_wrong_about_an_open_loop():
    """One that is slightly overloaded may look as if it kept up, and the other way round: then the check says so."""
    found = {load: Counter(verdicts(queue(load, seed=n))["steady state"] for n in range(40)) for load in (0.5, 1.5)}
    assert found[0.5][Verdict.FAIL] <= 1
    assert found[1.5][Verdict.PASS] <= 1
    assert found[1.5][Verdict.FAIL] > 30


def test_few_requests_that_wait_are_unclear():
    waiting = queue(3.0, count=15)
    assert verdicts(waiting)["steady state"] == Verdict.NOTE
    assert "drift test needs 40" in reason("steady state", waiting)
    assert "unclear, more requests would tell" in reason("steady state", waiting)


def test_a_trend_without_a_queue_is_unclear():
    """As of a server that is busy and keeps up."""
    run = StageRun(Stage(0, Bounds(), arrival="poisson", rate=10.0))
    run.samples = stage(drift=1.0).run.samples
    run.load_end_s = 20.0
    assert verdicts(evaluate(run))["steady state"] == Verdict.NOTE
    assert "unclear" in reason("steady state", evaluate(run))


def test_requests_that_never_began_are_in_the_queue():
    stuck = queue(0.3)
    for entry in stuck.run.samples[40:]:
        entry.finished_s, entry.error = None, UNFINISHED
        del entry.chunk_times_s[:]
    assert "unclear" in reason("steady state", evaluate(stuck.run))


def test_an_empty_run_has_no_checklist():
    assert checklist([]) == []


def test_the_drift_test_agrees_with_kendalls_tau():
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = random.Random(3)
    values = [rng.random() + 0.01 * n for n in range(20) for _ in range(5)]
    found = drift_of(values)
    assert found is not None
    means = [sum(values[n : n + 5]) / 5 for n in range(0, 100, 5)]
    expected = scipy_stats.kendalltau(range(20), means, method="exact").pvalue
    assert found.p_value == pytest.approx(expected, rel=0.2, abs=0.002)


def test_noise_alone_rarely_counts_as_drift():
    rng = random.Random(5)
    runs = [drift_of([rng.lognormvariate(0, 0.5) for _ in range(200)]) for _ in range(200)]
    assert sum(run is not None and run.is_drift for run in runs) <= 8


def test_a_small_trend_is_no_drift():
    found = drift_of([1 + 0.0001 * n for n in range(200)])
    assert found is not None
    assert found.p_value < 0.01
    assert not found.is_drift


def test_equal_values_have_no_trend():
    found = drift_of([1.0] * 100)
    assert found is not None
    assert (found.p_value, found.change) == (1.0, 0.0)
