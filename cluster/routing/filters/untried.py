"""Leaves out workers on which the request has failed before, unless no others are left."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.routing.base import RoutingRequest, WorkerSnapshot


class Untried:
    """Implements :class:`cluster.routing.base.Filter`."""

    def filter(self, candidates: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        untried = [candidate for candidate in candidates if candidate.worker_id not in request.failed_on]
        return untried or list(candidates)
