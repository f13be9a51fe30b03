"""Metrics of the router: the counted events, and bounded values of every label."""

from __future__ import annotations

import math
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.errors import error_classes
from baton.core.timeline import Event, Timeline
from baton.rpc.wire import worker_pb2
from cluster.telemetry.metrics import RouterMetrics
from tests.request_records import make_record

RESERVED_SUFFIXES = ("_total", "_sum", "_count", "_bucket", "_info")
UNITS = ("seconds", "bytes", "tokens")


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def summed(metrics: RouterMetrics, name: str) -> float:
    """Over all labels."""
    return sum(s.value for family in metrics.registry.collect() for s in family.samples if s.name == name)


def finished_timeline() -> Timeline:
    timeline = Timeline("r")
    for event, at_s in (
        (Event.RECEIVED, 10.0),
        (Event.PREFILL_QUEUED, 10.1),
        (Event.PREFILL_STARTED, 10.3),
        (Event.FIRST_TOKEN_SAMPLED, 10.7),
        (Event.FIRST_TOKEN, 11.0),
        (Event.DECODE_QUEUED, 11.1),
        (Event.DECODE_STARTED, 11.4),
        (Event.FINISHED, 13.0),
    ):
        timeline.record(event, at_s)
    return timeline


def test_a_finished_sequence_is_counted_with_its_durations():
    metrics = RouterMetrics()
    record = make_record(7, timeline=finished_timeline(), num_output_tokens=5, num_cached_tokens=3, outcome="stop")
    metrics.placed(record)
    metrics.ended(record)
    assert value(metrics, "baton_requests_total", outcome="stop") == 1
    assert value(metrics, "baton_prompt_tokens_total") == 7
    assert value(metrics, "baton_output_tokens_total") == 5
    assert value(metrics, "baton_cached_prompt_tokens_total") == 3
    for name, amount in (
        ("baton_time_per_output_token_seconds", 0.5),
        ("baton_queue_seconds", 0.2),
        ("baton_prefill_seconds", 0.4),
        ("baton_decode_queue_seconds", 0.3),
        ("baton_decode_seconds", 2.0),
        ("baton_request_seconds", 3.0),
        ("baton_request_prompt_tokens", 7),
        ("baton_request_output_tokens", 5),
    ):
        assert summed(metrics, f"{name}_count") == 1
        assert summed(metrics, f"{name}_sum") == pytest.approx(amount)


def test_failures_and_cancellations_do_not_affect_the_durations():
    metrics = RouterMetrics()
    for outcome in ("cancelled", "worker_lost"):
        metrics.ended(make_record(timeline=finished_timeline(), num_output_tokens=2, outcome=outcome))
    assert value(metrics, "baton_requests_total", outcome="worker_lost") == 1
    assert value(metrics, "baton_output_tokens_total") == 4
    assert value(metrics, "baton_request_seconds_count") == 0


def test_first_tokens_and_gaps_are_observed_immediately_on_the_clock_of_the_router():
    metrics, record = RouterMetrics(), make_record()
    record.timeline.record(Event.RECEIVED, 10.0)
    for moment_s in (10.5, 10.75, 11.5):
        record.note_tokens(moment_s)
        metrics.tokens(record, 1)
    assert value(metrics, "baton_time_to_first_token_seconds_count", slo_class="standard") == 1
    assert value(metrics, "baton_time_to_first_token_seconds_sum", slo_class="standard") == 0.5
    assert value(metrics, "baton_inter_token_latency_seconds_count") == 2
    assert value(metrics, "baton_inter_token_latency_seconds_sum") == 1.0


def test_handoffs_are_counted_by_outcome():
    metrics = RouterMetrics()
    moved = worker_pb2.HandoffResult(
        num_bytes=100, num_shared_bytes=60, num_spared_bytes=80, num_tokens=7, num_cached_tokens=2, seconds=0.5
    )
    metrics.handed_off(make_record(), moved)
    metrics.handed_off(make_record(), worker_pb2.HandoffResult(error_code="kv_transfer_failed"))
    assert value(metrics, "baton_kv_transfers_total", outcome="ok") == 1
    assert value(metrics, "baton_kv_transfers_total", outcome="failed") == 1
    assert value(metrics, "baton_kv_transfer_bytes_total") == 100
    assert value(metrics, "baton_kv_transfer_shared_bytes_total") == 60
    assert value(metrics, "baton_kv_transfer_spared_bytes_total") == 80
    assert value(metrics, "baton_kv_transfer_tokens_total") == 7
    assert value(metrics, "baton_kv_transfer_saved_tokens_total") == 2
    assert value(metrics, "baton_kv_transfer_seconds_sum") == 0.5


def test_unknown_errors_create_no_new_labels():
    """Codes come over the wire; what a client or a broken peer can choose must not become a label."""
    metrics = RouterMetrics()
    for number in range(20):
        metrics.handed_off(make_record(), worker_pb2.HandoffResult(error_code=f"made-up-{number}"))
    assert "made-up" not in metrics.render().decode()


def test_known_labels_start_at_zero():
    """Or the first failure of a kind would be invisible to rate()."""
    metrics = RouterMetrics()
    for code in error_classes():
        assert metrics.registry.get_sample_value("baton_requests_total", {"outcome": code}) == 0
        assert metrics.registry.get_sample_value("baton_retries_total", {"reason": code}) == 0
    assert metrics.registry.get_sample_value("baton_rejections_total", {"reason": "overloaded"}) == 0
    assert metrics.registry.get_sample_value("baton_rejections_total", {"reason": "rate_limit_exceeded"}) == 0
    assert metrics.registry.get_sample_value("baton_local_prefills_total", {"reason": "recovery"}) == 0
    for name, labels in (
        ("baton_routes_total", {"kind": "local"}),
        ("baton_prefix_events_total", {"kind": "stored"}),
        ("baton_admission_refusals_total", {"slo_class": "interactive", "reason": "queue_full"}),
        ("baton_autoscaler_decisions_total", {"pool": "decode", "direction": "up", "reason": "load"}),
    ):
        assert metrics.registry.get_sample_value(name, labels) == 0, name


def test_an_unplanned_target_is_not_a_number():
    """Zero workers wanted would look like a plan."""
    metrics = RouterMetrics()
    for name in ("wanted_workers", "utilisation_ratio", "predicted_attainment_ratio"):
        shown = metrics.registry.get_sample_value(f"baton_autoscaler_{name}", {"pool": "prefill"})
        assert shown is not None
        assert math.isnan(shown)


def test_prometheus_can_parse_the_text():
    metrics = RouterMetrics()
    metrics.ended(make_record(timeline=finished_timeline(), num_output_tokens=5, outcome="stop"))
    text = metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {"baton_requests", "baton_kv_transfer_bytes", "baton_worker_kv_blocks_used"} <= families.keys()
    assert "_created" not in text


def test_names_follow_the_conventions_of_prometheus():
    """See prometheus.io, "Metric and label naming": one prefix, snake case, base units, a suffix by type."""
    for family in RouterMetrics().registry.collect():
        name = family.name
        assert re.fullmatch(r"baton(_[a-z0-9]+)+", name), name
        assert family.documentation.endswith("."), name
        assert not re.search(r"_(ms|millis|milliseconds|minutes|kb|mb|gb|kib|mib|gib|percent)(_|$)", name), name
        if family.type == "histogram":
            assert name.endswith(UNITS), name
        if family.type == "gauge" and name != "baton_build_info":
            assert not name.endswith(RESERVED_SUFFIXES), name
        assert {label for sample in family.samples for label in sample.labels} <= {
            *("pool", "worker", "method", "reason", "outcome", "endpoint", "status", "le", "version", "python"),
            *("slo_class", "result", "target", "window", "kind", "quantile", "scorer", "direction"),
        }, name
