"""Metrics by SLO class: latencies, results of requests, attainment and goodput."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.histogram_buckets import FAST_SECONDS, SECONDS
from baton.core.outcomes import FINISHED
from baton.core.slo import BUILTIN_CLASSES, SloClass, SloResult, SloVerdict, judge
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import RequestRecord
from cluster.telemetry.attainment import AttainmentTracker, WindowFigures
from cluster.telemetry.recent_latencies import RecentLatencies

_LABEL = "slo_class"


class SloMetrics(RequestObserver):
    """Judges finished requests, and holds the metrics with the label ``slo_class``.

    The label's values are the classes of the configuration.

    Args:
        clock: monotonic seconds, for the sliding windows.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        classes: Iterable[SloClass] = BUILTIN_CLASSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._classes: tuple[SloClass, ...] = ()
        self._attainment = AttainmentTracker((), clock)
        self._latencies: defaultdict[str, RecentLatencies] = defaultdict(lambda: RecentLatencies(clock))
        self._requests = Counter(
            "baton_slo_requests",
            "Finished sequences, by SLO class and result.",
            [_LABEL, "result"],
            registry=registry,
        )
        self._ttft = Histogram(
            "baton_time_to_first_token_seconds",
            "Time from receipt to the first token.",
            [_LABEL],
            buckets=SECONDS,
            registry=registry,
        )
        self._tpot = Histogram(
            "baton_time_per_output_token_seconds",
            "Mean time per token of a sequence after its first token.",
            [_LABEL],
            buckets=FAST_SECONDS,
            registry=registry,
        )
        self._target = Gauge(
            "baton_slo_target_seconds", "Targets of an SLO class.", [_LABEL, "target"], registry=registry
        )
        self._objective = Gauge(
            "baton_slo_objective_ratio",
            "Share of sequences that should meet both targets of their SLO class.",
            [_LABEL],
            registry=registry,
        )
        self.set_classes(classes)
        registry.register(_AttainmentCollector(self._attainment))

    def set_classes(self, classes: Iterable[SloClass]) -> None:
        """Changes the classes. Those that were removed keep their series, since their requests may still run."""
        self._classes = tuple(classes)
        self._attainment.add_classes(slo.name for slo in self._classes)
        for slo in self._classes:
            self._ttft.labels(slo.name)
            self._tpot.labels(slo.name)
            for result in SloResult:
                self._requests.labels(slo.name, str(result))
            self._target.labels(slo.name, "ttft").set(slo.ttft_s)
            self._target.labels(slo.name, "tpot").set(slo.tpot_s)
            self._objective.labels(slo.name).set(slo.objective)

    def ttft(self, slo: SloClass) -> Histogram:
        """Times to the first token of a class, in seconds."""
        return self._ttft.labels(slo.name)

    def tpot(self, slo: SloClass) -> Histogram:
        """Times per output token of a class, in seconds."""
        return self._tpot.labels(slo.name)

    def ended(self, record: RequestRecord) -> None:
        slo = record.request.slo
        verdict = judge(slo, record.timeline, str(record.outcome), len(record.token_ids))
        record.timeline.attributes.update(verdict.attributes())
        self.observe(slo, verdict)
        if str(record.outcome) in FINISHED:
            self._latencies[slo.name].add(record.timeline.ttft_ms, record.timeline.tpot_ms(len(record.token_ids)))

    def observe(self, slo: SloClass, verdict: SloVerdict) -> None:
        """Counts a finished request."""
        self._requests.labels(slo.name, str(verdict.result)).inc()
        if verdict.is_met is not None:
            self._attainment.add(slo.name, met=verdict.is_met)

    def status(self) -> dict[str, Any]:
        """Targets, and figures by window, of each class for ``GET /admin/status``; JSON-ready."""
        figures = self._attainment.read()
        return {
            slo.name: {
                "ttft_target_ms": round(slo.ttft_s * 1e3, 3),
                "tpot_target_ms": round(slo.tpot_s * 1e3, 3),
                "percentile": slo.percentile,
                "windows": {window: _window_status(counts) for window, counts in figures[slo.name].items()},
                "latency": self._latencies[slo.name].status(),
            }
            for slo in self._classes
        }


def _window_status(figures: WindowFigures) -> Mapping[str, float | None]:
    attainment = figures.attainment
    return {
        "requests": figures.num_requests,
        "attainment": None if attainment is None else round(attainment, 4),
        "goodput_per_s": round(figures.goodput, 4),
    }


class _AttainmentCollector(Collector):
    """Reads the windows at each scrape. Without requests, attainment is NaN."""

    def __init__(self, attainment: AttainmentTracker) -> None:
        self._attainment = attainment

    def collect(self) -> Iterator[Metric]:
        labels = [_LABEL, "window"]
        attainment = GaugeMetricFamily(
            "baton_slo_attainment_ratio", "Share of sequences that met both targets, over a window.", labels=labels
        )
        goodput = GaugeMetricFamily(
            "baton_slo_goodput_requests_per_second",
            "Sequences per second that met both targets, over a window.",
            labels=labels,
        )
        for name, windows in self._attainment.read().items():
            for window, figures in windows.items():
                attained = figures.attainment
                attainment.add_metric([name, window], math.nan if attained is None else attained)
                goodput.add_metric([name, window], figures.goodput)
        yield attainment
        yield goodput
