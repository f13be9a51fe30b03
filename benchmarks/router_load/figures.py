"""Figures from figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from baton.bench.latency import Summary


def added_latency(through: Summary, directly: Summary) -> dict[str, float]:
    """What the router adds, in milliseconds: percentiles of requests through it, less the median without it.

    The worker's own bad moments are left in the upper percentiles, so that these are upper bounds.
    """
    return {
        "p50": through.p50 - directly.p50,
        "p95": through.p95 - directly.p50,
        "p99": through.p99 - directly.p50,
    }


def mib(num_bytes: float) -> float:
    """Bytes as MiB."""
    return num_bytes / 2**20


def median_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Number by number the median of several runs of the same measurement; what is no number is the first run's."""
    return {key: _median([run[key] for run in runs]) for key in runs[0]}


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return median_figures(values)
    if isinstance(first, list):
        return [_median(column) for column in zip(*values, strict=True)]
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return median(values)
    return first


def growth_per_thousand(samples: Iterable[tuple[float, float]]) -> float:
    """Slope of ``(requests, value)`` by least squares, times a thousand; 0 for fewer than two samples."""
    points = list(samples)
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 1000.0 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
