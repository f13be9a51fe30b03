"""Pickers: which of the scored routes a request takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cluster.routing.routing_contracts import LOCAL, Candidates, Floats, Ints, Picker, WorkerSnapshot

_EQUAL = 1e-9


class BestScore:
    """Picks the route with the best score; ties go to the workers that have had the fewest requests."""

    needs_scores = True

    def pick(self, candidates: Candidates, scores: Floats, among: Ints) -> int:
        return best_of(candidates, scores, among)


def best_of(candidates: Candidates, scores: Floats, indices: Ints) -> int:
    """The best of some routes. The requests of a local route's worker count twice, to compare with pairs."""
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


class PowerOfTwo:
    """Picks the better of two random routes, which spreads requests that arrive together.

    M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001).
    """

    needs_scores = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Candidates, scores: Floats, among: Ints) -> int:
        count = len(among)
        return best_of(candidates, scores, among[self._rng.sample(range(count), min(2, count))])


class RoundRobin:
    """Picks the workers of each pool in turn, regardless of their load, as a baseline.

    The worker whose last request is oldest is next, so the picker has no state and a joining worker gets one turn.
    Pairs take precedence over local routes.
    """

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
    """The routes whose worker has gone longest without a new request."""
    present = {int(index) for index in indices[among]}
    if LOCAL in present:
        return among
    chosen = min(present, key=lambda index: (workers[index].last_assigned_s, workers[index].worker_id))
    return np.asarray(among[indices[among] == chosen])


class RandomRoute:
    """Picks a random route, as the lowest baseline."""

    needs_scores = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Candidates, scores: Floats, among: Ints) -> int:
        return int(among[self._rng.randrange(len(among))])


PICKERS: Mapping[str, Callable[[random.Random], Picker]] = {
    "best_score": lambda _: BestScore(),
    "power_of_two": PowerOfTwo,
    "round_robin": lambda _: RoundRobin(),
    "random": RandomRoute,
}
"""Pickers by their names in the configuration; each gets a random generator. Add a new picker here."""
