"""A routing profile: filters, then weighted scorers, then a picker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.routing.base import Filter, Picker, RoutingRequest, Scorer, WorkerSnapshot
from cluster.routing.filters.accepting import Accepting
from cluster.routing.filters.untried import Untried
from cluster.routing.pickers.best_score import BestScore
from cluster.routing.scorers.least_loaded import LeastLoaded


@dataclass(frozen=True, slots=True)
class RoutingProfile:
    """
    Attributes:
        scorers: each with its weight.
    """

    filters: tuple[Filter, ...]
    scorers: tuple[tuple[Scorer, float], ...]
    picker: Picker

    def select(self, candidates: Sequence[WorkerSnapshot], request: RoutingRequest) -> WorkerSnapshot | None:
        """The worker for a request, or None when every candidate was filtered out."""
        remaining = list(candidates)
        for policy in self.filters:
            remaining = policy.filter(remaining, request)
        if not remaining:
            return None
        totals = dict.fromkeys((candidate.worker_id for candidate in remaining), 0.0)
        for scorer, weight in self.scorers:
            for worker_id, score in scorer.score(remaining, request).items():
                totals[worker_id] += weight * score
        return self.picker.pick(remaining, totals)


def default_profile() -> RoutingProfile:
    """Healthy, not one that has failed the request before if there are others, least loaded."""
    return RoutingProfile((Accepting(), Untried()), ((LeastLoaded(), 1.0),), BestScore())
