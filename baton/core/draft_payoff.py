"""What drafts of a given length are worth: the textbook arithmetic of speculative decoding. No torch here.

A round drafts k tokens and verifies them in one step of the target. Let α be the chance that a drafted token is
accepted, given that all before it were, and c the cost of one drafted token relative to a plain step of the target:

    E(k) = 1 + α + α² + … + α^k = (1 - α^(k+1)) / (1 - α)        tokens of a round (Leviathan et al., section 3.1)
    speedup(k) = E(k) / (1 + c·k)                                 over plain decoding (the same, theorem 3.8)

With an α for each position, the powers become products. With costs measured at a batch size, c is the cost at that
size; it contains the verification too, since a larger batch does not verify for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from operator import mul
from typing import Any

MAX_LENGTH = 16
"""Longest draft of a curve."""
LARGEST_DRAFT_SHARE = 0.1
"""Size of a draft network relative to its target beyond which a pass of it usually costs too much."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The chance α that a drafted token is accepted, given that all before it were.

    Args:
        by_position: chances in [0, 1] from the first position on; the last one holds for all later positions.

    Raises:
        ValueError: there is none, or one is not in [0, 1].
    """

    by_position: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.by_position:
            raise ValueError("an acceptance needs a chance for the first position at least")
        for chance in self.by_position:
            if not 0.0 <= chance <= 1.0:
                raise ValueError(f"an acceptance must be between 0 and 1, got {chance:g}")

    def chances(self, length: int) -> list[float]:
        """The chance at each position of a draft."""
        given = self.by_position[:length]
        return [*given, *[self.by_position[-1]] * (length - len(given))]

    def expected_tokens(self, length: int) -> float:
        """E(k): tokens that a round with a draft of ``length`` yields on average, the target's own one included."""
        accepted: float = sum(accumulate(self.chances(length), mul))
        return 1.0 + accepted


def speedup(acceptance: Acceptance, cost: float, length: int) -> float:
    """Tokens per time with drafts of ``length``, relative to plain decoding.

    Args:
        cost: of a drafted token, relative to a plain step of the target.
    """
    return acceptance.expected_tokens(length) / (1.0 + cost * length)


@dataclass(frozen=True, slots=True)
class PayoffCurve:
    """The speed-up by length of the draft.

    Attributes:
        speedups: for drafts of 1, 2, … tokens.
    """

    acceptance: Acceptance
    cost: float
    speedups: tuple[float, ...]

    @property
    def peak(self) -> int:
        """The best length; 0 if plain decoding is at least as fast as every length."""
        best = max(self.speedups)
        return self.speedups.index(best) + 1 if best > 1.0 else 0

    @property
    def peak_speedup(self) -> float:
        """The speed-up at the peak; 1 without drafts."""
        return max(1.0, *self.speedups)

    @property
    def cliff(self) -> int | None:
        """The first length from the peak on that is slower than plain decoding; ``None``: none on the curve."""
        start = max(1, self.peak)
        return next((k for k in range(start, len(self.speedups) + 1) if self.speedups[k - 1] < 1.0), None)

    @property
    def largest_useful(self) -> int:
        """The longest draft that is faster than plain decoding; 0 if none is."""
        return max((k for k, gain in enumerate(self.speedups, start=1) if gain > 1.0), default=0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Figures are not rounded: rounded twice, a table and a sentence would show different digits."""
        return {
            "acceptance": list(self.acceptance.by_position),
            "cost": self.cost,
            "speedups": list(self.speedups),
            "expected_tokens": [self.acceptance.expected_tokens(k) for k in range(1, len(self.speedups) + 1)],
            "best": self.peak,
            "best_speedup": self.peak_speedup,
            "cliff": self.cliff,
            "largest_useful": self.largest_useful,
        }


def payoff_curve(acceptance: Acceptance, cost: float, max_length: int = MAX_LENGTH) -> PayoffCurve:
    """The speed-ups of drafts of 1 to ``max_length`` tokens.

    Raises:
        ValueError: ``cost`` is negative or not finite.
    """
    if not (isfinite(cost) and cost >= 0.0):
        raise ValueError(f"the cost of a drafted token must be a number from 0 on, got {cost:g}")
    gains = tuple(speedup(acceptance, cost, length) for length in range(1, max_length + 1))
    return PayoffCurve(acceptance, cost, gains)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule of thumb for acceptances from ``least`` on: lengths that usually pay, and what to do."""

    least: float
    lengths: tuple[int, int] | None
    text: str


_RULES = (
    _Rule(0.85, (5, 7), "long drafts pay"),
    _Rule(0.8, (4, 6), "between the rules for 0.6 to 0.8 and for 0.85: start in the middle and compare"),
    _Rule(0.6, (3, 5), "drafts of medium length pay"),
    _Rule(0.5, (1, 3), "short drafts pay only if they are cheap"),
    _Rule(0.0, None, "do not speculate"),
)


@dataclass(frozen=True, slots=True)
class PayoffAdvice:
    """What to do with a draft of known acceptance and cost.

    Attributes:
        rule_of_thumb: shortest and longest draft that usually pay at this acceptance; ``None``: do not speculate.
        length: the best length by the formula, which decides; 0: do not speculate.
        text: both, as a sentence or two.
    """

    rule_of_thumb: tuple[int, int] | None
    length: int
    text: str


def advise_length(alpha: float, curve: PayoffCurve) -> PayoffAdvice:
    """Advice from an acceptance that is the same for all positions, and the curve.

    The rule of thumb uses α alone, the formula c as well. From 0.5 on, the formula decides. Below 0.5, drafts are never
    advised, since a gain there is within the error of a measurement.
    """
    rule = next(rule for rule in _RULES if alpha >= rule.least)
    shown = f"α = {alpha:.2f}"
    if rule.lengths is None:
        return PayoffAdvice(None, 0, f"{shown}: {rule.text}; fewer than half of the drafted tokens are accepted.")
    low, high = rule.lengths
    thumb = f"{shown}: {rule.text} (k = {low} to {high})"
    if not curve.peak:
        return PayoffAdvice(
            rule.lengths, 0, f"{thumb}, but with c = {curve.cost:.2f} every length is slower: do not speculate."
        )
    found = f"with c = {curve.cost:.2f} the formula's best is k = {curve.peak}, {curve.peak_speedup:.2f} times as fast"
    joint = "and" if low <= curve.peak <= high else "but"
    end = "" if curve.cliff is None else f"; from k = {curve.cliff} on it is slower than plain decoding"
    return PayoffAdvice(rule.lengths, curve.peak, f"{thumb}, {joint} {found}{end}.")
