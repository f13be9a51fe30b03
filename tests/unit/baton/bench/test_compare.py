"""Two reports of one server are not called better or worse, and those of different servers are."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.bench.compare import compare
from baton.bench.document import _plain
from baton.bench.runner import StageRun
from baton.bench.sample import Sample, Slo
from baton.bench.stage_result import evaluate
from baton.bench.stages import Bounds, Stage


def report(seed: int, count: int, *, ttft_s: float = 0.1, num_failed: int = 0) -> dict[str, Any]:
    """One client at a time; the times of a request scatter by a third."""
    rng, at_s = random.Random(seed), 0.0
    run = StageRun(Stage(0, Bounds(), concurrency=1))
    for number in range(count):
        sample = Sample(at_s, False, 10, 8, sent_s=at_s, input_tokens=10, output_tokens=8)
        sample.error = "timeout" if number < num_failed else None
        first_s = at_s + ttft_s * rng.lognormvariate(0, 0.3)
        gap_s = 0.02 * rng.lognormvariate(0, 0.3)
        sample.chunk_times_s.extend(first_s + gap_s * index for index in range(8))
        at_s = sample.finished_s = sample.chunk_times_s[-1]
        run.samples.append(sample)
    run.load_end_s = at_s
    return {"stages": [_plain(evaluate(run, Slo(ttft_s=10.0)).to_dict(with_samples=False))]}


def verdicts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, str]:
    return {one.name: one.verdict for one in compare(first, second, 0.05)}


@pytest.mark.parametrize("count", [1, 8, 12, 100, 400])
def test_noise_is_neither_better_nor_worse(count: int) -> None:
    """Of 14 figures of 20 pairs of equal runs, hardly any is called different."""
    found = [
        verdict for seed in range(20) for verdict in verdicts(report(seed, count), report(99 - seed, count)).values()
    ]
    assert len(found) >= 20 * 13
    assert sum(verdict in ("better", "worse") for verdict in found) <= 0.02 * len(found)


@pytest.mark.parametrize("count", [12, 100])
def test_a_large_difference_is_found_in_few_requests(count: int) -> None:
    slow, quick = report(1, count, ttft_s=0.5), report(2, count)
    found = verdicts(slow, quick)
    better = ("TTFT p50 ms", "E2E p50 ms", "answered /s", "output tokens/s", "goodput /s")
    assert {found[name] for name in better} == {"better"}
    assert found["TPOT p50 ms"] in ("same", "unclear")
    assert {verdicts(quick, slow)[name] for name in better} == {"worse"}
    assert found["TTFT p95 ms"] == ("better" if count >= 73 else "unclear")


def test_failures_count_if_they_are_more_than_chance() -> None:
    assert "failed, share" not in verdicts(report(1, 100), report(2, 100))
    assert verdicts(report(1, 100), report(2, 100, num_failed=1))["failed, share"] == "unclear"
    assert verdicts(report(1, 100), report(2, 100, num_failed=30))["failed, share"] == "worse"


def test_a_report_is_the_same_as_itself() -> None:
    one = report(1, 12)
    assert set(verdicts(one, one).values()) == {"same"}
