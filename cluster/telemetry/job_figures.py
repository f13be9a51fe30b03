"""Figures of jobs for operators and scrapes. All routers of a cluster share its jobs, so these are the same in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

OPEN, COMPLETED, FAILED = "open", "completed", "failed"


@dataclass(frozen=True, slots=True)
class JobFigures:
    """
    Attributes:
        states: number of jobs by state, every state included.
        lines: number of lines of jobs that have not ended: ``open``, ``completed`` and ``failed``.
    """

    states: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def job_families(figures: JobFigures) -> Iterator[Metric]:
    """The Prometheus series."""
    jobs = GaugeMetricFamily("baton_jobs", "Jobs that are kept, by state.", labels=["state"])
    lines = GaugeMetricFamily("baton_job_lines", "Lines of jobs that have not ended, by state.", labels=["state"])
    for family, values in ((jobs, figures.states), (lines, figures.lines)):
        for state, count in values.items():
            family.add_metric([state], count)
        yield family
