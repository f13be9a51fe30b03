"""The best score; among equals, the workers that have had the fewest requests so far."""

from __future__ import annotations

import numpy as np

from cluster.routing.base import Candidates, Floats, Ints

_EQUAL = 1e-9


class BestScore:
    """Implements :class:`cluster.routing.base.Picker`."""

    needs_scores = True

    def pick(self, candidates: Candidates, scores: Floats, among: Ints) -> int:
        return best_of(candidates, scores, among)


def best_of(candidates: Candidates, scores: Floats, indices: Ints) -> int:
    """The best of some routes. A local one has one worker; its requests count twice against those of a pair."""
    equal = indices[scores[indices] >= scores[indices].max() - _EQUAL]
    if len(equal) > 1:
        decode = candidates.by_decode([worker.assigned for worker in candidates.decode_workers])
        prefill = candidates.by_prefill([worker.assigned for worker in candidates.prefill_workers])
        assigned = (np.where(candidates.is_local, decode, prefill) + decode)[equal]
        equal = equal[assigned == assigned.min()]
    return int(min(equal, key=lambda index: _name(candidates, int(index)))) if len(equal) > 1 else int(equal[0])


def _name(candidates: Candidates, index: int) -> tuple[str, str]:
    route = candidates.route(index)
    return (route.prefill.worker_id if route.prefill is not None else "", route.decode.worker_id)
