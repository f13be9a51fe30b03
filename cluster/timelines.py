"""The timelines of the last requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from engine.timeline import Timeline


class TimelineStore:
    """Keeps the newest ``capacity`` timelines, running requests included."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def add(self, timeline: Timeline) -> None:
        self._timelines.pop(timeline.request_id, None)
        self._timelines[timeline.request_id] = timeline
        while len(self._timelines) > self._capacity:
            self._timelines.popitem(last=False)

    def to_dict(self, request_id: str) -> dict[str, Any] | None:
        """A request's waterfall. One with several sequences has them under ``sequences``; None when unknown."""
        if (timeline := self._timelines.get(request_id)) is not None:
            return timeline.to_dict()
        sequences: list[dict[str, Any]] = []
        while (timeline := self._timelines.get(f"{request_id}-{len(sequences)}")) is not None:
            sequences.append(timeline.to_dict())
        return {"request_id": request_id, "sequences": sequences} if sequences else None
