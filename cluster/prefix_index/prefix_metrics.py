"""Prometheus series about the prefix index and its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

STORED = "stored"
EVICTED = "evicted"


class PrefixMetrics(Collector):
    """Metrics of the prefix index. The series of a worker end with it.

    Attributes:
        sizes: returns the known blocks by worker. Must be thread-safe.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sizes: Callable[[], Mapping[str, int]] = dict
        self._events = Counter(
            "baton_prefix_events",
            "Blocks that workers reported as added to or removed from their prefix caches, including snapshots.",
            ["kind"],
            registry=registry,
        )
        for kind in (STORED, EVICTED):
            self._events.labels(kind)
        self._snapshots = Counter(
            "baton_prefix_snapshots",
            "Snapshots of a whole prefix cache, sent when a stream began or the router was slow.",
            registry=registry,
        )
        self._restarts = Counter(
            "baton_prefix_stream_restarts", "Streams of prefix cache events that broke.", registry=registry
        )
        registry.register(self)

    def observe(self, num_stored: int, num_evicted: int, *, is_snapshot: bool) -> None:
        """Counts a message of a worker."""
        self._snapshots.inc(is_snapshot)
        self._events.labels(STORED).inc(num_stored)
        self._events.labels(EVICTED).inc(num_evicted)

    def observe_restart(self) -> None:
        """Counts a broken stream."""
        self._restarts.inc()

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "baton_prefix_known_blocks", "Blocks known to be in a worker's prefix cache.", labels=["worker"]
        )
        for worker_id, num_blocks in self.sizes().items():
            family.add_metric([worker_id], num_blocks)
        yield family
