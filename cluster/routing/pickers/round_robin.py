"""The workers of each pool in turn, whatever they do: the usual baseline.

Whose turn it is follows from when workers last got a request, so that nothing is remembered here, and a worker that
joins gets its turn and no more. Pairs go before local routes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.routing.base import LOCAL, Candidates, Floats, Ints, WorkerSnapshot


class RoundRobin:
    """Implements :class:`cluster.routing.base.Picker`."""

    needs_scores = False

    def pick(self, candidates: Candidates, scores: Floats, among: Ints) -> int:
        local = candidates.is_local[among]
        among = among[local == local.min()]
        for workers, indices in (
            (candidates.prefill_workers, candidates.prefill),
            (candidates.decode_workers, candidates.decode),
        ):
            among = _longest_unused(workers, indices, among)
        return int(among[0])


def _longest_unused(workers: Sequence[WorkerSnapshot], indices: Ints, among: Ints) -> Ints:
    """Of some routes those whose worker has waited longest for a request."""
    present = {int(index) for index in indices[among]}
    if LOCAL in present:
        return among
    chosen = min(present, key=lambda index: (workers[index].last_assigned_s, workers[index].worker_id))
    return np.asarray(among[indices[among] == chosen])
