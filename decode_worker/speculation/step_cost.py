"""What a forward costs, by its sequences and tokens: learned from the steps that the worker runs anyway."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
_LEARNING_RATE = 0.15
_OUTLIER = 3.0
# Before anything is measured: a forward of n tokens costs 1 + 0.025 (n - 1) times a forward of one, which is about what
# memory-bound decoding costs on CPUs and GPUs alike.
_PRIOR_SLOPE = 0.025


def _prior(num_tokens: float) -> float:
    return 1.0 + _PRIOR_SLOPE * (num_tokens - 1)


class StepCost:
    """``ms(num_sequences, num_tokens)`` of a step.

    Measured sizes are exponentially weighted means; others follow from their neighbours by the shape of the prior.
    """

    def __init__(self) -> None:
        self._ms: dict[tuple[int, int], float] = {}

    def record(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        """Books a step. One that took several times as long as usual says more of the machine than of the size."""
        size = (_size_of(num_sequences), _size_of(num_tokens))
        known = self._ms.get(size)
        if known is None:
            # The first step of a size may have been a cold one; without this it would never be tried again.
            self._ms[size] = min(ms, _OUTLIER * self.ms(num_sequences, num_tokens)) if self._ms else ms
        else:
            self._ms[size] = known + _LEARNING_RATE * (min(ms, _OUTLIER * known) - known)

    def ms(self, num_sequences: int, num_tokens: int) -> float:
        """Expected milliseconds; in units of an unknown step while nothing was measured."""
        if not self._ms:
            return _prior(num_tokens)
        batch = _nearest((batch for batch, _ in self._ms), num_sequences)
        known = {tokens: ms for (size, tokens), ms in self._ms.items() if size == batch}
        return _interpolated(known, num_tokens)


def _interpolated(known: dict[int, float], num_tokens: int) -> float:
    size = _size_of(num_tokens)
    if size in known:
        return known[size] * _prior(num_tokens) / _prior(size)
    sizes = sorted(known)
    right = bisect.bisect_left(sizes, size)
    if right == 0 or right == len(sizes):
        edge = sizes[0] if right == 0 else sizes[-1]
        return known[edge] * _prior(num_tokens) / _prior(edge)
    low, high = sizes[right - 1], sizes[right]
    share = (num_tokens - low) / (high - low)
    return known[low] + share * (known[high] - known[low])


def _nearest(sizes: Iterable[int], value: int) -> int:
    return min(set(sizes), key=lambda size: (abs(size - value), size))


def _size_of(value: int) -> int:
    """The smallest class that holds ``value``."""
    return _SIZES[min(bisect.bisect_left(_SIZES, value), len(_SIZES) - 1)]
