"""Which of all routes are weighed: all of them while they are few, else those of some workers of each pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from cluster.routing.base import LOCAL, Ints, WorkerSnapshot

_BEST_HOLDERS = 2


class LocalPrefill(StrEnum):
    """Whether decode workers may compute prompts themselves."""

    AUTO = "auto"
    """Where the scores say so."""
    NEVER = "never"
    """Only to go on with a request whose worker was lost."""
    ALWAYS = "always"
    """Nothing is handed over."""


class Scan:
    """
    Args:
        limit: pairs up to which every route is weighed.
        sample: beyond, workers of each pool: drawn at random, but those that hold most of the prompt are always among
            them.
    """

    def __init__(self, limit: int, sample: int, rng: random.Random) -> None:
        self._limit = limit
        self._sample = sample
        self._rng = rng

    def narrow(
        self, prefill: Sequence[WorkerSnapshot], decode: Sequence[WorkerSnapshot]
    ) -> tuple[Sequence[WorkerSnapshot], Sequence[WorkerSnapshot]]:
        """The workers whose routes are weighed."""
        if len(prefill) * len(decode) <= self._limit:
            return prefill, decode
        return self._draw(prefill), self._draw(decode)

    def _draw(self, workers: Sequence[WorkerSnapshot]) -> Sequence[WorkerSnapshot]:
        if len(workers) <= self._sample:
            return workers
        by_cached = sorted(workers, key=lambda worker: worker.cached_tokens, reverse=True)
        holders = [worker for worker in by_cached[: min(_BEST_HOLDERS, self._sample)] if worker.cached_tokens > 0]
        others = self._rng.sample(by_cached[len(holders) :], self._sample - len(holders))
        return [*holders, *others]


def count_routes(num_prefill: int, num_decode: int, local: LocalPrefill) -> int:
    """How many there are."""
    num_pairs = 0 if local is LocalPrefill.ALWAYS else num_prefill * num_decode
    return num_pairs + (0 if local is LocalPrefill.NEVER else num_decode)


def routes(num_prefill: int, num_decode: int, local: LocalPrefill) -> tuple[Ints, Ints]:
    """Indices of the workers of every route, each ``[num_routes]``; local routes come last."""
    prefill = np.repeat(np.arange(num_prefill), num_decode)
    decode = np.tile(np.arange(num_decode), num_prefill)
    alone = np.arange(num_decode)
    if local is LocalPrefill.NEVER:
        return prefill, decode
    if local is LocalPrefill.ALWAYS:
        return np.full(num_decode, LOCAL), alone
    return np.concatenate([prefill, np.full(num_decode, LOCAL)]), np.concatenate([decode, alone])
