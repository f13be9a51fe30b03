"""How often drafts are accepted, learned while serving."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

_PRIOR_WEIGHT = 4.0
_MAX_WEIGHT = 60.0


@dataclass(slots=True)
class _Estimate:
    mean: float
    weight: float


class AcceptanceTracker:
    """Conditional acceptance by key: the share of drafts that the target agreed with, given that all before them were.

    An estimate starts at its prior, which counts for a few observations, and forgets what lies more than about
    sixty observations back.
    """

    def __init__(self) -> None:
        self._estimates: dict[Hashable, _Estimate] = {}

    def estimate(self, key: Hashable, prior: float) -> float:
        found = self._estimates.get(key)
        return prior if found is None else found.mean

    def record(self, key: Hashable, prior: float, value: float) -> None:
        """Books one observation. Of drafts only those count that were reached: all before them were accepted."""
        found = self._estimates.setdefault(key, _Estimate(prior, _PRIOR_WEIGHT))
        found.weight = min(found.weight + 1, _MAX_WEIGHT)
        found.mean += (value - found.mean) / found.weight

    def forget(self, key: Hashable) -> None:
        self._estimates.pop(key, None)

    def record_chain(
        self, num_drafted: int, num_accepted: int, key_of: Callable[[int], tuple[Hashable, float]]
    ) -> None:
        """Books the drafts of a chain that were reached: the accepted ones, and the first that was not.

        Args:
            key_of: key and prior of the draft at a position.
        """
        for position in range(min(num_accepted + 1, num_drafted)):
            key, prior = key_of(position)
            self.record(key, prior, float(position < num_accepted))
