"""The page of all metrics, from the registry of a router with a worker in each pool."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from baton.core.roles import POOLS
from baton.rpc.wire import worker_pb2
from cluster.controller.pool_member import ChangeOrigin
from cluster.jobs.job_types import Status
from cluster.telemetry.cluster_metrics import ClusterFigures, PoolFigures
from cluster.telemetry.job_figures import COMPLETED, FAILED, OPEN, JobFigures
from cluster.telemetry.metrics import RouterMetrics
from tests.reference_pages.markdown import code, plain, table

_HEAD = """# Metrics

Every series of `GET /metrics`, which a router answers for the whole cluster, in Prometheus' text format. Units are
seconds, bytes and tokens. A histogram has the series `_bucket`, `_sum` and `_count`, a summary the last two. With
[several routers](../several-routers.md), series of routers also have the label `router`.
[Observability](../observability.md#metrics) says what to look at first, and
[deploy/grafana](../../deploy/grafana/README.md) has a dashboard and alerts.

This page is generated: `python -m tests.reference_pages`.
"""


def sample_page() -> str:
    """What ``GET /metrics`` answers when every series exists: a worker in each pool, and a request."""
    metrics = RouterMetrics()
    method = worker_pb2.MethodStats(
        method="ngram", reached=[1], accepted=[1], chosen_lengths=[1], costs=[worker_pb2.DraftCost(size_class=1)]
    )
    stats = worker_pb2.WorkerStats(methods=[method], speculation=worker_pb2.SpeculationState(default_method="auto"))
    states = dict.fromkeys(("starting", "ready", "draining"), 0)
    pool = PoolFigures(1, states, {"up": 0, "down": 0}, 1, {"serving": 0}, dict.fromkeys(map(str, ChangeOrigin), 0))
    workers = {(name, f"{name}-1"): stats for name in POOLS}
    jobs = JobFigures({str(status): 0 for status in Status}, {OPEN: 0, COMPLETED: 0, FAILED: 0})
    metrics.cluster.figures = ClusterFigures(workers, dict.fromkeys(POOLS, pool), 0, jobs=jobs)
    metrics.prefixes.sizes = lambda: {worker: 0 for _, worker in workers}
    metrics.http.observe("/v1/completions", 200, None)
    return metrics.render().decode()


def render() -> str:
    """The text of the page."""
    rows = []
    for family in text_string_to_metric_families(sample_page()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        rows.append((code(name), family.type, ", ".join(map(code, labels)), plain(family.documentation)))
    return f"{_HEAD}\n{table(['series', 'type', 'labels', ''], rows)}"
