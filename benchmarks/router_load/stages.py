"""What the router's own stages took, from the timelines of requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from baton.bench.latency import Summary
from baton.core.timeline import Event

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
"""In the order of a request that is not streamed."""


def stage_summaries(timelines: Iterable[Timeline]) -> dict[str, dict[str, float]]:
    """Stage → its :class:`Summary` in milliseconds, over the requests that have it."""
    found = list(timelines)
    return {name: asdict(Summary.of_seconds(_seconds(found, *stage))) for name, stage in STAGES.items()}


def _seconds(timelines: Iterable[Timeline], start: Event, end: Event) -> Iterator[float]:
    for events in timelines:
        if start in events and end in events:
            yield (events[end] - events[start]) / 1e3
