"""How far predictions must stay under a target, so that as many requests keep it as their class promises. Pure.

A prediction is no promise: those who come later share the steps, and answers differ. The factor between prediction and
target is learned from outcomes, one at a time: a miss raises it by much, a hit lowers it by little, so that it rests
where the wanted share is kept. That is a stochastic approximation of a quantile (Robbins and Monro, 1951), used for
predictions as in Gibbs and Candès, *Adaptive Conformal Inference Under Distribution Shift* (2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from statistics import NormalDist

from baton.core.slo import SloClass

LARGEST_FACTOR = 3.0
_STEP = 0.06
_AIM = 0.75
"""Of the misses that are allowed, so many are aimed at: what comes scatters about the aim, and it is a promise."""
_SMALLEST_MISS_SHARE = 0.005
_FIRST_SD = 0.08
"""Relative; of outcomes around predictions, while nothing is known of it."""
_ONE_ROUND = 1.3
"""Outcomes come late. A miss of a request that went under a factor so much smaller raises it no further; it lets the
factor stay where it is for longer."""
_LONGEST_STAY = 2.0


@dataclass(frozen=True, slots=True)
class Factors:
    """What is left of a target is divided by these before predictions are compared with it; at least 1."""

    ttft: float = 1.0
    tpot: float = 1.0


class SafetyMargin:
    """Of one class and one of its targets.

    Args:
        miss_share: how many may miss the target.
    """

    def __init__(self, miss_share: float) -> None:
        self._miss_share = min(max(miss_share, _SMALLEST_MISS_SHARE), 0.5)
        self.factor = min(LARGEST_FACTOR, exp(_FIRST_SD * NormalDist().inv_cdf(1 - self._miss_share)))
        self._stay = 0.0

    def observe(self, used_factor: float, *, kept: bool) -> None:
        """Learns from a request that came close to its target, or missed it.

        Args:
            used_factor: the one that it was admitted with.
        """
        fall, rise = _STEP * self._miss_share, _STEP * (1 - self._miss_share)
        if not kept and used_factor * _ONE_ROUND < self.factor:
            self._stay = min(_LONGEST_STAY, self._stay + rise)
        elif not kept:
            self.factor = min(LARGEST_FACTOR, self.factor * exp(rise))
        elif self._stay > 0:
            self._stay -= fall
        else:
            self.factor = max(1.0, self.factor * exp(-fall))


class ClassMargins:
    """The margins of one class. Its percentile is about both targets, so each may cost half of the misses."""

    def __init__(self, slo: SloClass) -> None:
        miss_share = _AIM * (1 - slo.objective) / 2
        self.ttft = SafetyMargin(miss_share)
        self.tpot = SafetyMargin(miss_share)

    @property
    def factors(self) -> Factors:
        return Factors(self.ttft.factor, self.tpot.factor)
