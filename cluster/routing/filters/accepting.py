"""Keeps workers that take new requests."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.routing.base import RoutingRequest, WorkerSnapshot


class Accepting:
    """Implements :class:`cluster.routing.base.Filter`."""

    def filter(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        return [worker for worker in workers if worker.accepting]
