"""Prefers workers with fewer requests: ``1 / (1 + in_flight)``."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.routing.base import RoutingRequest, WorkerSnapshot


class LeastLoaded:
    """Implements :class:`cluster.routing.base.Scorer`."""

    def score(self, candidates: Sequence[WorkerSnapshot], request: RoutingRequest) -> dict[str, float]:
        return {candidate.worker_id: 1 / (1 + candidate.in_flight) for candidate in candidates}
