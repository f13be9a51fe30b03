"""Computes the shown figures from measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from baton.bench.latency import Summary
from baton.core.timeline import Event


def added_latency(through: Summary, directly: Summary) -> dict[str, float]:
    """The latency that the router adds, in milliseconds: percentiles with the router minus the median without it.

    The upper percentiles include slow moments of the worker, so they are upper bounds.
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
    """The median of each number over several runs; other values are those of the first run."""
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


Timeline = Mapping[str, float]
"""Name of an event → milliseconds since the request came."""

STAGES: Mapping[str, tuple[Event, Event]] = {
    "HTTP: until the application has it": (Event.RECEIVED, Event.ACCEPTED),
    "body and access": (Event.ACCEPTED, Event.PARSED),
    "checks and tokenizing": (Event.PARSED, Event.TOKENIZED),
    "admission and routing": (Event.TOKENIZED, Event.ROUTED),
    "worker, there and back": (Event.ROUTED, Event.FIRST_TOKEN),
    "answer": (Event.FINISHED, Event.SENT),
}
"""The stages of a request that is not streamed, in order."""


def stage_summaries(timelines: Iterable[Timeline]) -> dict[str, dict[str, float]]:
    """The :class:`Summary` of each stage in milliseconds, over the requests that have it."""
    found = list(timelines)
    return {name: asdict(Summary.of_seconds(_seconds(found, *stage))) for name, stage in STAGES.items()}


def _seconds(timelines: Iterable[Timeline], start: Event, end: Event) -> Iterator[float]:
    for events in timelines:
        if start in events and end in events:
            yield (events[end] - events[start]) / 1e3
