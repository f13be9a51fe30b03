"""Series of workers and pools: they end with their worker, and values that workers report create no new labels."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from baton.rpc.wire import worker_pb2
from cluster.telemetry.cluster_metrics import ClusterCollector, ClusterFigures, PoolFigures
from cluster.telemetry.job_figures import JobFigures

POOL = PoolFigures(
    target=2,
    states={"starting": 1, "ready": 1, "draining": 0},
    scale_events={"up": 3, "down": 1},
    num_started=4,
    failures={"starting": 0, "serving": 2},
    role_changes={"autoscaler": 1, "operator": 0},
)


def registry_of(collector: ClusterCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def test_monotonic_values_are_counters():
    collector = ClusterCollector()
    method = worker_pb2.MethodStats(method="ngram", num_drafts=2, num_drafted_tokens=6, num_accepted_tokens=5)
    stats = worker_pb2.WorkerStats(num_steps=7, num_running=3, kv_bytes_sent=9, methods=[method])
    collector.figures = ClusterFigures({("decode", "decode-1"): stats}, {"decode": POOL}, 1)
    registry = registry_of(collector)
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    labels = {"pool": "decode", "worker": "decode-1"}
    assert families["baton_worker_steps"].type == "counter"
    assert families["baton_worker_running_requests"].type == "gauge"
    assert registry.get_sample_value("baton_worker_steps_total", labels) == 7
    assert registry.get_sample_value("baton_worker_running_requests", labels) == 3
    assert registry.get_sample_value("baton_worker_kv_sent_bytes_total", labels) == 9
    assert (
        registry.get_sample_value("baton_worker_accepted_tokens_total", {**labels, "method": "ngram", "mode": "used"})
        == 5
    )
    assert registry.get_sample_value("baton_router_restarts_total") == 1


def test_pools_have_sizes_states_and_a_history():
    collector = ClusterCollector()
    collector.figures = ClusterFigures(
        pools={"prefill": POOL, "decode": replace(POOL, target=5)}, suspicions={"prefill": 0, "decode": 3}
    )
    registry = registry_of(collector)
    assert registry.get_sample_value("baton_workers_target", {"pool": "decode"}) == 5
    assert registry.get_sample_value("baton_workers", {"pool": "prefill", "state": "ready"}) == 1
    assert registry.get_sample_value("baton_workers", {"pool": "prefill", "state": "draining"}) == 0
    assert registry.get_sample_value("baton_scale_events_total", {"pool": "decode", "direction": "up"}) == 3
    assert registry.get_sample_value("baton_worker_suspicions_total", {"pool": "decode"}) == 3
    assert registry.get_sample_value("baton_worker_starts_total", {"pool": "decode"}) == 4
    assert registry.get_sample_value("baton_worker_failures_total", {"pool": "decode", "phase": "serving"}) == 2
    assert registry.get_sample_value("baton_role_changes_total", {"pool": "decode", "by": "autoscaler"}) == 1


def test_removed_workers_lose_their_series():
    collector = ClusterCollector()
    registry = registry_of(collector)
    num_lines = set()
    for number in range(50):
        stats = worker_pb2.WorkerStats(kv_blocks_used=number)
        collector.figures = ClusterFigures({("decode", f"decode-{number}"): stats})
        text = generate_latest(registry).decode()
        num_lines.add(text.count("\n"))
    assert text.count('worker="decode-49"') == text.count("worker=") > 0
    assert len(num_lines) == 1


def test_an_unresponsive_worker_is_down_and_has_no_other_series():
    collector = ClusterCollector()
    collector.figures = ClusterFigures({("decode", "decode-1"): None, ("decode", "decode-2"): worker_pb2.WorkerStats()})
    registry = registry_of(collector)
    up = {name: registry.get_sample_value("baton_worker_up", {"pool": "decode", "worker": name})
          for name in ("decode-1", "decode-2")}  # fmt: skip
    assert up == {"decode-1": 0, "decode-2": 1}
    assert generate_latest(registry).decode().count('worker="decode-1"') == 1


def test_unconfigured_methods_are_counted_together():
    collector = ClusterCollector()
    methods = [worker_pb2.MethodStats(method=f"made-up-{number}", num_drafts=1) for number in range(20)]
    collector.figures = ClusterFigures({("decode", "d"): worker_pb2.WorkerStats(methods=methods)})
    registry = registry_of(collector)
    labels = {"pool": "decode", "worker": "d", "method": "other", "mode": "used"}
    assert registry.get_sample_value("baton_worker_drafts_total", labels) == 20
    assert "made-up" not in generate_latest(registry).decode()


def test_jobs_are_gauges_by_state():
    collector = ClusterCollector()
    assert registry_of(collector).get_sample_value("baton_jobs", {"state": "completed"}) is None
    collector.figures = ClusterFigures(jobs=JobFigures({"in_progress": 1, "completed": 0}, {"open": 7}))
    registry = registry_of(collector)
    assert registry.get_sample_value("baton_jobs", {"state": "in_progress"}) == 1
    assert registry.get_sample_value("baton_jobs", {"state": "completed"}) == 0
    assert registry.get_sample_value("baton_job_lines", {"state": "open"}) == 7
