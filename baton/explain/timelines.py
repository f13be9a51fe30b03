"""The store of the timelines of the last requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Literal

from baton.core.errors import NotFoundError
from baton.core.request_ids import is_warmup, owned_id, public_id
from baton.core.timeline import Event, Timeline
from baton.explain.blame import explain

Order = Literal["newest", "slowest", "slowest_first_token"]
# Limit per answer, since each takes about 3 ms of the event loop. Others are available one by one.
_MAX_SEQUENCES = 16


class TimelineStore:
    """Keeps the newest ``capacity`` timelines, including those of running requests."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def __len__(self) -> int:
        return len(self._timelines)

    def add(self, timeline: Timeline) -> None:
        self._timelines.pop(timeline.request_id, None)
        self._timelines[timeline.request_id] = timeline
        while len(self._timelines) > self._capacity:
            self._timelines.popitem(last=False)

    def keeps(self, request_id: str) -> bool:
        """Whether the id names a stored sequence, or a request with several sequences."""
        return request_id in self._timelines or self._member(request_id, 0) is not None

    def to_dict(self, request_id: str) -> dict[str, Any] | None:
        """A request's waterfall; ``None`` if unknown. The first kept ones of several are in ``sequences``."""
        if (timeline := self._timelines.get(request_id)) is not None:
            return {**timeline.to_dict(), **explain(timeline)}
        members = (timeline for timeline in self._timelines.values() if timeline.group == request_id)
        sequences = [{**timeline.to_dict(), **explain(timeline)} for timeline in islice(members, _MAX_SEQUENCES)]
        return {"request_id": request_id, "sequences": sequences} if sequences else None

    def _member(self, group: str, index: int) -> Timeline | None:
        """A sequence of a request. The group is checked, since clients may choose ids of the same form."""
        timeline = self._timelines.get(f"{group}-{index}")
        return timeline if timeline is not None and timeline.group == group else None

    def find(self, request_id: str, owner: str | None = None) -> dict[str, Any]:
        """A request's waterfall, as from :meth:`to_dict`.

        Args:
            request_id: the id that the client knows; without an owner, also the one within the cluster.
            owner: finds the requests of this API key only; ``None`` finds those of all, the newest of that name.

        Raises:
            NotFoundError: there is none. The message does not tell whether another owner has one.
        """
        found = self.to_dict(owned_id(owner, request_id) if owner is not None else self._newest(request_id))
        if found is None:
            raise NotFoundError(
                f"There is no timeline of the request {request_id[:80]!r}. The timelines of the last {self._capacity} "
                "sequences are kept (router.timelines_kept). An invalid request has none. GET /v1/requests lists them.",
                param="request_id",
            )
        for entry in (found, *found.get("sequences", ())) if owner is not None else ():
            entry["request_id"] = public_id(entry["request_id"])
        return found

    def _newest(self, request_id: str) -> str:
        """The id within the cluster of the newest request with this id of any owner; otherwise ``request_id``."""
        if self.keeps(request_id):
            return request_id
        for name, timeline in reversed(self._timelines.items()):
            for candidate in (name, timeline.group or ""):
                if public_id(candidate) == request_id:
                    return candidate
        return request_id

    def listing(self, order: Order, limit: int) -> list[dict[str, Any]]:
        """The newest or the slowest sequences, with figures in milliseconds. Warm-ups never count as slow.

        Args:
            order: ``slowest`` by the whole time, ``slowest_first_token`` by the time until the first token.
        """
        return [summary for _, summary in self.ranked(order, limit)]

    def ranked(self, order: Order, limit: int) -> list[tuple[float, dict[str, Any]]]:
        """Like :meth:`listing`, each with the number by which they are sorted, largest first."""
        rank = _RANKS[order]
        timelines = list(reversed(self._timelines.values()))
        timelines.sort(key=rank, reverse=True)  # stable, so the newest first among equals
        return [(rank(timeline), _summary(timeline)) for timeline in timelines[:limit]]


def _total_ms(timeline: Timeline) -> float | None:
    return timeline.between_ms(Event.RECEIVED, Event.SENT) or timeline.total_ms


def _total_s(timeline: Timeline) -> float:
    return 0.0 if is_warmup(timeline.request_id) else (_total_ms(timeline) or 0.0) / 1e3


def _first_token_s(timeline: Timeline) -> float:
    return 0.0 if is_warmup(timeline.request_id) else (timeline.ttft_ms or 0.0) / 1e3


def _received_s(timeline: Timeline) -> float:
    """When the request came, on the clock of the machine."""
    return timeline.events.get(Event.RECEIVED, 0.0)


_RANKS: Mapping[Order, Callable[[Timeline], float]] = {
    "newest": _received_s,
    "slowest": _total_s,
    "slowest_first_token": _first_token_s,
}


def _summary(timeline: Timeline) -> dict[str, Any]:
    attributes = timeline.attributes
    return {
        "request_id": timeline.request_id,
        "outcome": attributes.get("outcome"),
        "prompt_tokens": attributes.get("prompt_tokens"),
        "output_tokens": attributes.get("output_tokens"),
        "time_to_first_token_ms": _rounded(timeline.ttft_ms),
        "total_ms": _rounded(_total_ms(timeline)),
    }


def _rounded(value_ms: float | None) -> float | None:
    return None if value_ms is None else round(value_ms, 3)
