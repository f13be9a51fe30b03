"""Figures of hand-made stages, worked out by hand."""

import pytest

from baton.bench.latency import Summary, percentile_ms
from baton.bench.runner import StageRun
from baton.bench.sample import Sample, Slo, parse_slo
from baton.bench.stage_result import evaluate
from baton.bench.stages import Bounds, Stage
from baton.core.errors import ConfigError


def answered(at_s: float, ttft_s: float = 0.1, gap_s: float = 0.1, chunks: int = 3, **values) -> Sample:
    """Sent when it was due; one token a chunk."""
    sample = Sample(at_s, False, 10, chunks, sent_s=at_s, input_tokens=10, output_tokens=chunks, error=None)
    sample.chunk_times_s.extend(at_s + ttft_s + gap_s * index for index in range(chunks))
    sample.finished_s = sample.chunk_times_s[-1]
    for name, value in values.items():
        setattr(sample, name, value)
    return sample


def run_of(samples, start_s, end_s, stage=None) -> StageRun:
    run = StageRun(stage or Stage(0, Bounds(), concurrency=1))
    run.samples, run.load_start_s, run.load_end_s = list(samples), start_s, end_s
    return run


def test_percentiles_include_all_samples():
    summary = Summary.of_seconds([None, *(number / 1000 for number in range(101))])
    assert (summary.count, summary.min, summary.p50, summary.p95, summary.p99, summary.max) == pytest.approx(
        (101, 0, 50, 95, 99, 100)
    )
    assert Summary.of_seconds([None]) == Summary()
    assert percentile_ms([None, 1.0, 3.0], 50) == 2000


def test_throughput_is_measured_within_the_window():
    """One request a second for ten seconds; the last one ends behind the window."""
    result = evaluate(run_of((answered(float(second)) for second in range(11)), 0.0, 10.0))
    assert result.window.is_steady
    assert result.requests_per_s == pytest.approx(1.0)
    assert result.output_tokens_per_s == pytest.approx(3.0)
    assert result.input_tokens_per_s == pytest.approx(10.0)


def test_an_open_loop_is_measured_once_the_server_is_full():
    """Ten requests/s, each answered after 1 s with two tokens: exactly what a server that keeps up gives back."""
    samples = [answered(second / 10, ttft_s=0.5, gap_s=0.5, chunks=2) for second in range(101)]
    result = evaluate(run_of(samples, 0.0, 10.0, Stage(0, Bounds(), "constant", rate=10.0)), Slo(ttft_s=1.0))
    assert result.window.is_steady
    assert result.window.start_s == pytest.approx(1.0)
    assert result.offered_per_s == pytest.approx(10.0)
    # Both ends of the window are in it: 91 answers in nine seconds.
    assert result.requests_per_s == pytest.approx(10.0, abs=0.12)
    assert result.goodput_per_s == pytest.approx(10.0, abs=0.12)
    assert result.output_tokens_per_s == pytest.approx(20.0, abs=0.25)


def test_a_warm_up_that_filled_the_server_is_all_that_is_left_out():
    samples = [answered(second / 10, is_warmup=second < 30) for second in range(101)]
    result = evaluate(run_of(samples, 3.0, 10.0, Stage(0, Bounds(warmup_requests=30), "constant", rate=10.0)))
    assert result.window.start_s == 3.0
    assert result.offered_per_s == pytest.approx(10.0)


def test_tokens_of_unfinished_answers_count_up_to_the_end():
    samples = [answered(float(second), ttft_s=0.5, gap_s=1.0, chunks=2) for second in range(11)]
    result = evaluate(run_of(samples, 0.0, 10.0))
    # 10 first tokens and 9 second ones come in ten seconds
    assert result.output_tokens_per_s == pytest.approx(1.9)


def test_a_short_stage_is_measured_to_its_end():
    result = evaluate(run_of([answered(0.0, ttft_s=1.0), answered(0.1, ttft_s=1.0)], 0.0, 0.1))
    assert not result.window.is_steady
    assert result.window.end_s == pytest.approx(1.3)
    assert any("too short" in note for note in result.notes)


def test_a_window_with_few_answers_is_not_steady():
    """Four due within 0.4 s, three of which end behind it."""
    samples = [answered(0.0, 0.05, 0.0), *(answered(0.1 * index, 0.45 - 0.1 * index, 0.05) for index in (1, 2, 3))]
    result = evaluate(run_of(samples, 0.0, 0.4, Stage(0, Bounds(), "trace")))
    assert not result.window.is_steady
    assert result.requests_per_s == pytest.approx(4 / result.window.seconds)


def test_latencies_exclude_the_warm_up():
    slow = answered(0.0, ttft_s=50.0, is_warmup=True)
    result = evaluate(run_of([slow, *(answered(1.0 + second) for second in range(9))], 1.0, 9.0))
    assert result.num_measured == 9
    assert result.latencies["ttft_ms"].max == pytest.approx(100)


def test_failures_are_misses_and_have_no_latency():
    failed = Sample(2.0, False, 10, 3, sent_s=2.0, finished_s=2.1, error="http_503", error_message="busy")
    samples = [answered(0.0), answered(1.0), failed, answered(3.0, ttft_s=5.0)]
    result = evaluate(run_of(samples, 0.0, 10.0), Slo(ttft_s=1.0))
    assert result.failures == {"http_503": 1}
    assert result.attainment == 0.5
    assert result.goodput_per_s == pytest.approx(0.2)
    assert result.latencies["ttft_ms"].count == 3


def test_unusual_results_are_noted():
    odd = [
        answered(0.0, counts_are_chunks=True),
        answered(1.0, output_tokens=2),
        answered(2.0, input_tokens=17),
        *(answered(3.0 + second) for second in range(3)),
    ]
    run = run_of(odd, 0.0, 6.0)
    run.num_clipped = 4
    notes = "\n".join(evaluate(run).notes)
    assert "1 answers had no usage" in notes
    assert "1 answers have a different length" in notes
    assert "1 prompts have a different length than intended, by up to 7 tokens" in notes
    assert "4 of 6 requests were shortened" in notes


def test_an_empty_stage_has_figures():
    result = evaluate(run_of([], 0.0, 0.0), Slo(ttft_s=1.0))
    assert result.num_measured == 0
    assert result.attainment is None
    assert result.offered_per_s == 0.0
    assert any("no request was measured" in note for note in result.notes)
    assert result.to_dict(with_samples=True)["samples"] == []


class TestSlo:
    def test_slo_limits_have_units(self):
        assert parse_slo("--slo", "ttft=500ms, tpot=0.05,e2e=1min") == Slo(0.5, 0.05, 60.0)

    def test_every_limit_must_hold(self):
        sample = answered(0.0, ttft_s=0.4, gap_s=0.04)
        assert Slo(0.5, 0.05, 1.0).is_met(sample)
        assert not Slo(0.3, 0.05, 1.0).is_met(sample)
        assert not Slo(0.5, 0.03, 1.0).is_met(sample)
        assert not Slo(0.5, 0.05, 0.4).is_met(sample)

    def test_time_waiting_to_be_sent_counts(self):
        assert not Slo(0.5).is_met(answered(0.0, ttft_s=0.4, intended_s=-0.2))

    def test_one_token_cannot_miss_its_tpot(self):
        assert Slo(tpot_s=0.001).is_met(answered(0.0, chunks=1))

    @pytest.mark.parametrize(
        ("text", "fragment"),
        [
            ("tfft=1s", "Did you mean ttft"),
            ("ttft", "KEY=VALUE"),
            ("ttft=soon", "duration"),
            ("ttft=0s", "above 0"),
            ("", "must have at least one limit"),
        ],
    )
    def test_an_invalid_limit_is_refused(self, text, fragment):
        with pytest.raises(ConfigError) as caught:
            parse_slo("--slo", text)
        assert fragment in caught.value.message
