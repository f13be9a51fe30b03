"""Any route: what a policy must beat to be worth anything."""

from __future__ import annotations

import random

from cluster.routing.base import Candidates, Floats, Ints


class RandomRoute:
    """Implements :class:`cluster.routing.base.Picker`."""

    needs_scores = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Candidates, scores: Floats, among: Ints) -> int:
        return int(among[self._rng.randrange(len(among))])
