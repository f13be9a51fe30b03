"""Metrics: what is counted, and that no label takes values without bound."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import RouterMetrics
from cluster.wire import worker_pb2
from engine.timeline import Event, Timeline


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def finished_timeline() -> Timeline:
    timeline = Timeline("r")
    for event, at_s in (
        (Event.RECEIVED, 10.0),
        (Event.PREFILL_QUEUED, 10.1),
        (Event.PREFILL_STARTED, 10.3),
        (Event.FIRST_TOKEN_SAMPLED, 10.7),
        (Event.FIRST_TOKEN, 11.0),
        (Event.FINISHED, 13.0),
    ):
        timeline.record(event, at_s)
    return timeline


def test_a_finished_sequence_is_booked_with_its_durations():
    metrics = RouterMetrics()
    metrics.observe_end(finished_timeline(), "stop", 5, 3)
    assert value(metrics, "baton_requests_total", outcome="stop") == 1
    assert value(metrics, "baton_output_tokens_total") == 5
    assert value(metrics, "baton_cached_prompt_tokens_total") == 3
    for name, seconds in (
        ("baton_time_to_first_token_seconds", 1.0),
        ("baton_time_per_output_token_seconds", 0.5),
        ("baton_queue_seconds", 0.2),
        ("baton_prefill_seconds", 0.4),
        ("baton_request_seconds", 3.0),
    ):
        assert value(metrics, f"{name}_count") == 1
        assert abs(value(metrics, f"{name}_sum") - seconds) < 1e-9


def test_failures_and_cancellations_do_not_spoil_the_durations():
    metrics = RouterMetrics()
    for outcome in ("cancelled", "worker_lost"):
        metrics.observe_end(finished_timeline(), outcome, 2)
    assert value(metrics, "baton_requests_total", outcome="worker_lost") == 1
    assert value(metrics, "baton_output_tokens_total") == 4
    assert value(metrics, "baton_request_seconds_count") == 0


def test_handoffs_are_booked_by_outcome():
    metrics = RouterMetrics()
    metrics.observe_handoff(worker_pb2.HandoffResult(num_bytes=100, num_tokens=7, num_cached_tokens=2, seconds=0.5))
    metrics.observe_handoff(worker_pb2.HandoffResult(error_code="kv_transfer_failed"))
    assert value(metrics, "baton_kv_transfers_total", outcome="ok") == 1
    assert value(metrics, "baton_kv_transfers_total", outcome="failed") == 1
    assert value(metrics, "baton_kv_transfer_bytes_total") == 100
    assert value(metrics, "baton_kv_transfer_tokens_total") == 7
    assert value(metrics, "baton_kv_transfer_saved_tokens_total") == 2
    assert value(metrics, "baton_kv_transfer_seconds_sum") == 0.5


def test_workers_that_are_gone_lose_their_series():
    metrics = RouterMetrics()
    for number in range(50):
        metrics.set_workers({("decode", f"decode-{number}"): worker_pb2.WorkerStats(kv_blocks_used=number)})
    text = metrics.render().decode()
    assert text.count('worker="decode-49"') == text.count("worker=")
    assert value(metrics, "baton_worker_kv_blocks_used", pool="decode", worker="decode-49") == 49


def test_errors_that_nobody_knows_make_no_new_labels():
    """Codes come over the wire; what a client or a broken peer can choose must not become a label."""
    metrics = RouterMetrics()
    for number in range(20):
        metrics.observe_handoff(worker_pb2.HandoffResult(error_code=f"made-up-{number}"))
    assert "made-up" not in metrics.render().decode()


def test_the_text_is_what_prometheus_reads():
    metrics = RouterMetrics()
    metrics.observe_end(finished_timeline(), "stop", 5)
    families = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    assert {"baton_requests", "baton_kv_transfer_bytes", "baton_worker_kv_blocks_used"} <= families
    assert all(name.startswith("baton_") for name in families)
