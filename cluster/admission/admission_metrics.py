"""Metrics of admission control, by SLO class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.histogram_buckets import SECONDS
from baton.core.slo import SloClass
from cluster.admission.refusals import Refusal
from cluster.admission.room import Factors

_LABEL = "slo_class"


class AdmissionMetrics:
    """Metrics of the queue, refusals and waits.

    Attributes:
        queued: the number of queued sequences by class; read at each scrape.
        factors: the margins by class; read at each scrape.
    """

    def __init__(self, registry: CollectorRegistry, classes: Iterable[SloClass]) -> None:
        self._classes: tuple[str, ...] = ()
        self.queued: Callable[[], Mapping[str, int]] = dict
        self.factors: Callable[[], Mapping[str, Factors]] = dict
        self._refusals = Counter(
            "baton_admission_refusals",
            "Refused sequences, by SLO class and reason.",
            [_LABEL, "reason"],
            registry=registry,
        )
        self._wait = Histogram(
            "baton_admission_wait_seconds",
            "Time that admitted sequences waited for a route.",
            [_LABEL],
            buckets=SECONDS,
            registry=registry,
        )
        self._batching_delay = Histogram(
            "baton_admission_gather_seconds",
            "Time that prompts waited to share a prefill step.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
            registry=registry,
        )
        self.set_classes(classes)
        registry.register(_AdmissionCollector(self))

    def set_classes(self, classes: Iterable[SloClass]) -> None:
        """Changes the classes. Those that were removed keep their counters."""
        self._classes = tuple(slo.name for slo in classes)
        for name in self._classes:
            self._wait.labels(name)
            for reason in Refusal:
                self._refusals.labels(name, str(reason))

    def observe_refusal(self, slo: SloClass, reason: str) -> None:
        self._refusals.labels(slo.name, reason).inc()

    def observe_wait(self, slo: SloClass, seconds: float) -> None:
        self._wait.labels(slo.name).observe(seconds)

    def observe_batching_delay(self, seconds: float) -> None:
        self._batching_delay.observe(seconds)

    def status(self) -> dict[str, Any]:
        """The queued sequences and margins of each class for ``GET /admin/status``; JSON-ready."""
        queued, factors = self.queued(), self.factors()
        return {
            name: {
                "queued": queued.get(name, 0),
                "ttft_margin": round(factors.get(name, Factors()).ttft, 3),
                "tpot_margin": round(factors.get(name, Factors()).tpot, 3),
            }
            for name in self._classes
        }

    def families(self) -> Iterator[Metric]:
        """The gauges of the queue and of the margins."""
        waiting = GaugeMetricFamily("baton_admission_queued", "Sequences that wait for admission.", labels=[_LABEL])
        margin = GaugeMetricFamily(
            "baton_admission_margin_ratio",
            "Learned factor by which targets are divided before predictions are compared with them.",
            labels=[_LABEL, "target"],
        )
        for name, status in self.status().items():
            waiting.add_metric([name], status["queued"])
            margin.add_metric([name, "ttft"], status["ttft_margin"])
            margin.add_metric([name, "tpot"], status["tpot_margin"])
        yield waiting
        yield margin


class _AdmissionCollector(Collector):
    """Reads the queue at each scrape."""

    def __init__(self, metrics: AdmissionMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.families()
