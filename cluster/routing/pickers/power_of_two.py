"""The better of two routes drawn at random, which keeps requests that come together from all taking the best one.

M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001).
"""

from __future__ import annotations

import random

from cluster.routing.base import Candidates, Floats, Ints
from cluster.routing.pickers.best_score import best_of


class PowerOfTwo:
    """Implements :class:`cluster.routing.base.Picker`."""

    needs_scores = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Candidates, scores: Floats, among: Ints) -> int:
        count = len(among)
        return best_of(candidates, scores, among[self._rng.sample(range(count), min(2, count))])
