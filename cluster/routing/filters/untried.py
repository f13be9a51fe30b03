"""Leaves out workers on which the request has failed before, unless no others are left."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.routing.base import RoutingRequest, WorkerSnapshot


class Untried:
    """Implements :class:`cluster.routing.base.Filter`."""

    def filter(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        if not request.failed_on:
            return list(workers)
        return [worker for worker in workers if worker.worker_id not in request.failed_on] or list(workers)
