"""Whether counts look like draws from a known distribution."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Outcome = TypeVar("Outcome", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """
    Attributes:
        p_value: the chance of counts at least as far from the expected ones, if they are draws from it.
    """

    statistic: float
    degrees_of_freedom: int
    p_value: float


def chi_square(
    counts: Mapping[Outcome, int], expected: Mapping[Outcome, float], least_expected: float = 5.0
) -> ChiSquare:
    """Pearson's test of goodness of fit.

    Args:
        counts: draws by outcome.
        expected: probabilities by outcome; they add up to 1. Outcomes that are not in it must not occur.
        least_expected: outcomes that are expected less often than this are put together.
    """
    num_draws = sum(counts.values())
    if any(count and not expected.get(outcome, 0.0) > 0 for outcome, count in counts.items()):
        return ChiSquare(float("inf"), len(expected), 0.0)
    cells: list[tuple[float, float]] = []
    rest_count, rest_expected = 0.0, 0.0
    for outcome, probability in expected.items():
        count, mean = float(counts.get(outcome, 0)), probability * num_draws
        if mean >= least_expected:
            cells.append((count, mean))
        else:
            rest_count, rest_expected = rest_count + count, rest_expected + mean
    if rest_expected >= least_expected or not cells:
        cells.append((rest_count, rest_expected))
    elif rest_expected:
        count, mean = cells.pop()
        cells.append((count + rest_count, mean + rest_expected))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = max(1, len(cells) - 1)
    return ChiSquare(statistic, freedom, _upper_tail(statistic, freedom))


def _upper_tail(statistic: float, freedom: int) -> float:
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
