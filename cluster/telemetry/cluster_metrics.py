"""Prometheus series of workers, pools and jobs. The series of a worker end with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.rpc.wire import worker_pb2
from cluster.telemetry.draft_metrics import draft_families
from cluster.telemetry.job_figures import JobFigures, job_families


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """A pool's size and its history since the controller started.

    Attributes:
        states: number of workers by state.
        scale_events: changes of the target, by direction.
        failures: workers that ended unexpectedly, by phase: starting, serving, or hanging until they were replaced.
        role_changes: workers taken over from the other pool, by origin of the request.
    """

    target: int
    states: Mapping[str, int]
    scale_events: Mapping[str, int]
    num_started: int
    failures: Mapping[str, int]
    role_changes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """The answers of workers and controller to one poll.

    Attributes:
        workers: statistics by (pool, worker id); ``None`` for a worker that did not answer.
        pools: figures by pool; empty if the controller did not answer.
        suspicions: how often the router suspected a worker, by pool.
        jobs: figures of jobs; empty if jobs are disabled or not known yet.
    """

    workers: Mapping[tuple[str, str], worker_pb2.WorkerStats | None] = field(default_factory=dict)
    pools: Mapping[str, PoolFigures] = field(default_factory=dict)
    num_router_restarts: int | None = None
    suspicions: Mapping[str, int] = field(default_factory=dict)
    jobs: JobFigures = field(default_factory=JobFigures)


@dataclass(frozen=True, slots=True)
class _Series:
    """A series of a worker: the metric's name, the field of its statistics, and the help text."""

    name: str
    field: str
    text: str
    family_type: ClassVar[type[CounterMetricFamily] | type[GaugeMetricFamily]]

    def family(self, labels: list[str]) -> CounterMetricFamily | GaugeMetricFamily:
        return self.family_type(self.name, self.text, labels=labels)


class _Gauge(_Series):
    family_type = GaugeMetricFamily


class _Counter(_Series):
    family_type = CounterMetricFamily


_WORKER_SERIES = (
    _Gauge("baton_worker_uptime_seconds", "uptime_s", "Seconds since the worker began to serve."),
    _Gauge("baton_worker_running_requests", "num_running", "Requests in the worker's batch."),
    _Gauge("baton_worker_waiting_requests", "num_waiting", "Requests that wait in the worker's queue."),
    _Gauge("baton_worker_transfers", "num_transfers", "KV hand-offs in progress."),
    _Gauge("baton_worker_kv_blocks", "kv_blocks_total", "KV blocks of the worker."),
    _Gauge("baton_worker_kv_blocks_used", "kv_blocks_used", "KV blocks held by requests and hand-offs."),
    _Gauge("baton_worker_kv_blocks_cached", "kv_blocks_cached", "Free KV blocks whose content can be reused."),
    _Counter(
        "baton_worker_kv_leaked_blocks", "num_leaked_blocks", "KV blocks in use without an owner; more than 0 is a bug."
    ),
    _Counter("baton_worker_preemptions", "num_preemptions", "Requests that lost their KV blocks and were recomputed."),
    _Counter("baton_worker_steps", "num_steps", "Engine steps."),
    _Counter(
        "baton_worker_prefill_tokens",
        "prefill_tokens",
        "Prompt tokens computed, without those from a prefix cache or a hand-off.",
    ),
    _Counter("baton_worker_generated_tokens", "generated_tokens", "Tokens generated."),
    _Counter("baton_worker_kv_sent_bytes", "kv_bytes_sent", "KV bytes sent."),
    _Counter("baton_worker_kv_received_bytes", "kv_bytes_received", "KV bytes received."),
    _Counter(
        "baton_worker_draft_failures",
        "num_draft_failures",
        "Times that a speculation method failed and was disabled. Its requests continued without it.",
    ),
)


class ClusterCollector(Collector):
    """Exports the newest :class:`ClusterFigures`. Only present workers have series."""

    def __init__(self) -> None:
        self.figures = ClusterFigures()
        """Replaced as a whole, so that rendering in another thread is consistent."""

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        figures = self.figures
        yield from _pool_families(figures)
        yield from job_families(figures.jobs)
        up = GaugeMetricFamily("baton_worker_up", "1 if the worker answered this scrape.", labels=["pool", "worker"])
        for labels, stats in figures.workers.items():
            up.add_metric(labels, float(stats is not None))
        yield up
        answered = {labels: stats for labels, stats in figures.workers.items() if stats is not None}
        for series in _WORKER_SERIES:
            family = series.family(["pool", "worker"])
            for labels, stats in answered.items():
                family.add_metric(labels, getattr(stats, series.field))
            yield family
        yield from draft_families(answered)


def _pool_families(figures: ClusterFigures) -> Iterator[Metric]:
    pools = figures.pools
    target = GaugeMetricFamily("baton_workers_target", "Target number of workers of the pool.", labels=["pool"])
    workers = GaugeMetricFamily("baton_workers", "Workers of the pool, by state.", labels=["pool", "state"])
    scaled = CounterMetricFamily(
        "baton_scale_events", "Changes of the pool's target, by direction.", labels=["pool", "direction"]
    )
    started = CounterMetricFamily("baton_worker_starts", "Workers that became ready.", labels=["pool"])
    failed = CounterMetricFamily(
        "baton_worker_failures",
        "Workers that ended unexpectedly, by phase: starting, serving, or hanging until they were replaced.",
        labels=["pool", "phase"],
    )
    moved = CounterMetricFamily(
        "baton_role_changes",
        "Workers taken over from the other pool, by origin of the decision.",
        labels=["pool", "by"],
    )
    for name, pool in pools.items():
        target.add_metric([name], pool.target)
        started.add_metric([name], pool.num_started)
        for family, values in (
            (workers, pool.states),
            (scaled, pool.scale_events),
            (failed, pool.failures),
            (moved, pool.role_changes),
        ):
            for label, value in values.items():
                family.add_metric([name, label], value)
    suspected = CounterMetricFamily(
        "baton_worker_suspicions",
        "Times that the router suspected a worker because it did not answer or made no progress.",
        labels=["pool"],
    )
    for name, count in figures.suspicions.items():
        suspected.add_metric([name], count)
    yield from (target, workers, scaled, started, failed, moved, suspected)
    if figures.num_router_restarts is not None:
        restarts = CounterMetricFamily("baton_router_restarts", "Times that the router died and was replaced.")
        restarts.add_metric([], figures.num_router_restarts)
        yield restarts
