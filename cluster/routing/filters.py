"""Filters: they drop the workers that cannot or should not serve a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cluster.routing.routing_contracts import Filter, RoutingRequest, WorkerSnapshot


class Accepting:
    """Keeps workers that take new requests."""

    def filter(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        return [worker for worker in workers if worker.accepting]


class Untried:
    """Drops workers on which the request has failed before, unless no others are left."""

    def filter(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        if not request.failed_on:
            return list(workers)
        return [worker for worker in workers if worker.worker_id not in request.failed_on] or list(workers)


class HasRoom:
    """Drops workers with a full batch or too few KV blocks for the request, unless no others are left.

    A request that fits nowhere waits on a worker.
    """

    def filter(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        return [worker for worker in workers if worker.has_capacity(request.num_tokens)] or list(workers)


FILTERS: Mapping[str, Callable[[], Filter]] = {
    "accepting": Accepting,
    "untried": Untried,
    "has_room": HasRoom,
}
"""Filters by their names in the configuration, in the order in which they run. Add a new filter here."""
