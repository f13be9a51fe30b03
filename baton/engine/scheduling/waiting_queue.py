"""Waiting requests in their policy's order: adding and removing take a binary search, reading is free."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

from baton.core.request import Request
from baton.engine.scheduling.ordering import OrderingPolicy

Entry = tuple[tuple[float, ...], int, Request]
"""A request's key, a number that breaks ties by arrival in this queue, and the request."""

_REKEY_EVERY_S = 0.25
"""Interval of recomputing keys. They change in whole steps of a late request's patience, which is seconds."""


class WaitingQueue:
    """A sorted queue; the scheduler owns it."""

    def __init__(self, ordering: OrderingPolicy) -> None:
        self._ordering = ordering
        self._entries: list[Entry] = []
        self._by_id: dict[str, Entry] = {}
        self._numbers = itertools.count()
        self._keyed_s = float("-inf")

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Iterates in the order of the last :meth:`in_order`."""
        return (request for _, _, request in self._entries)

    def add(self, request: Request, now_s: float) -> None:
        entry = (self._ordering.key(request, now_s), next(self._numbers), request)
        self._by_id[request.request_id] = entry
        insort(self._entries, entry)

    def remove(self, request: Request) -> None:
        """Removes a request. Raises KeyError for one that is not in the queue."""
        entry = self._by_id.pop(request.request_id)
        del self._entries[bisect_left(self._entries, entry)]

    def in_order(self, now_s: float) -> list[Entry]:
        """Returns a copy, so that the caller may add and remove while iterating."""
        if now_s - self._keyed_s >= _REKEY_EVERY_S:
            self._keyed_s = now_s
            self._entries = sorted((self._ordering.key(r, now_s), number, r) for _, number, r in self._entries)
            self._by_id = {entry[2].request_id: entry for entry in self._entries}
        return list(self._entries)
