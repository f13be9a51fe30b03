"""The best score; among equals, the worker that has had the fewest requests so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.routing.base import WorkerSnapshot


class BestScore:
    """Implements :class:`cluster.routing.base.Picker`."""

    def pick(self, candidates: Sequence[WorkerSnapshot], scores: Mapping[str, float]) -> WorkerSnapshot:
        return min(candidates, key=lambda c: (-scores[c.worker_id], c.assigned, c.worker_id))
