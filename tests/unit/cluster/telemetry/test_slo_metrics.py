"""SLO classes in the metrics and in the status: figures by class and window, and only of configured classes."""

from __future__ import annotations

import json
import math

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.core.slo import BUILTIN_CLASSES, INTERACTIVE, STANDARD, SloResult, SloVerdict
from baton.core.timeline import Event, Timeline
from cluster.telemetry.slo_metrics import SloMetrics
from tests.request_records import make_record


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> SloMetrics:
    times = iter(float(second) for second in range(10_000))
    return SloMetrics(registry, clock=lambda: next(times) / 1000 + 50.0)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, labels)
    assert found is not None, (name, labels)
    return found


def test_verdicts_are_counted_and_attainment_is_reported(registry: CollectorRegistry, metrics: SloMetrics) -> None:
    for result in (SloResult.MET, SloResult.MET, SloResult.MET, SloResult.REJECTED, SloResult.EXCLUDED):
        metrics.observe(INTERACTIVE, SloVerdict(result))
    for result, count in (("met", 3), ("rejected", 1), ("excluded", 1), ("missed_tpot", 0)):
        assert value(registry, "baton_slo_requests_total", slo_class="interactive", result=result) == count
    for window in ("1m", "5m", "1h"):
        labels = {"slo_class": "interactive", "window": window}
        assert value(registry, "baton_slo_attainment_ratio", **labels) == 0.75
        assert value(registry, "baton_slo_goodput_requests_per_second", **labels) == 3.0


def test_a_class_without_requests_has_no_attainment(registry: CollectorRegistry, metrics: SloMetrics) -> None:
    metrics.observe(INTERACTIVE, SloVerdict(SloResult.MET))
    assert math.isnan(value(registry, "baton_slo_attainment_ratio", slo_class="batch", window="5m"))
    assert metrics.status()["batch"]["windows"]["5m"] == {"requests": 0, "attainment": None, "goodput_per_s": 0.0}


def test_the_status_serializes_with_targets_and_windows(metrics: SloMetrics) -> None:
    metrics.observe(STANDARD, SloVerdict(SloResult.MISSED_TTFT, -1.0, 0.01))
    status = json.loads(json.dumps(metrics.status()))
    assert list(status) == [slo.name for slo in BUILTIN_CLASSES]
    assert (status["standard"]["ttft_target_ms"], status["standard"]["tpot_target_ms"]) == (3000.0, 100.0)
    assert status["standard"]["windows"]["1h"] == {"requests": 1, "attainment": 0.0, "goodput_per_s": 0.0}


def test_the_status_has_latencies_of_finished_requests_by_class(metrics: SloMetrics) -> None:
    events = {Event.RECEIVED: 1.0, Event.FIRST_TOKEN: 1.5, Event.FINISHED: 1.9}
    for outcome in ("stop", "cancelled"):
        timeline = Timeline("r", dict(events))
        metrics.ended(make_record(slo=INTERACTIVE, timeline=timeline, num_output_tokens=5, outcome=outcome))
    latency = {name: slo["latency"] for name, slo in metrics.status().items()}
    assert latency["interactive"]["requests"] == 1
    assert latency["interactive"]["ttft_ms"]["p95"] == 500.0
    assert latency["interactive"]["tpot_ms"]["p50"] == 100.0
    assert latency["batch"]["requests"] == 0


def test_targets_are_published(registry: CollectorRegistry, metrics: SloMetrics) -> None:
    assert value(registry, "baton_slo_target_seconds", slo_class="interactive", target="tpot") == 0.05
    assert value(registry, "baton_slo_objective_ratio", slo_class="batch") == 0.9


def test_every_series_exists_from_the_start(registry: CollectorRegistry, metrics: SloMetrics) -> None:
    before = generate_latest(registry).decode().count("\n")
    for result in SloResult:
        metrics.observe(STANDARD, SloVerdict(result))
    metrics.ttft(STANDARD).observe(0.1)
    metrics.tpot(STANDARD).observe(0.01)
    assert generate_latest(registry).decode().count("\n") == before
