"""Prefers workers with fewer requests: the mean of ``1 / (1 + in_flight)`` over the workers of the route."""

from __future__ import annotations

import numpy as np

from cluster.routing.base import Candidates, Floats, WorkerSnapshot


class LeastLoaded:
    """Implements :class:`cluster.routing.base.Scorer`."""

    def score(self, candidates: Candidates) -> Floats:
        decode = candidates.by_decode([_freedom(worker) for worker in candidates.decode_workers])
        prefill = candidates.by_prefill([_freedom(worker) for worker in candidates.prefill_workers])
        return np.where(candidates.is_local, decode, (prefill + decode) / 2)


def _freedom(worker: WorkerSnapshot) -> float:
    return 1 / (1 + worker.in_flight)
