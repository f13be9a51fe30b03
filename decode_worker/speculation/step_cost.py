"""What a forward costs, by its number of tokens: learned from the steps that the worker runs anyway."""

from __future__ import annotations

import bisect

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
_LEARNING_RATE = 0.15
_OUTLIER = 3.0
# Before anything is measured: a forward of n tokens costs 1 + 0.025 (n - 1) times a forward of one, which is about what
# memory-bound decoding costs on CPUs and GPUs alike.
_PRIOR_SLOPE = 0.025


def _prior(num_tokens: float) -> float:
    return 1.0 + _PRIOR_SLOPE * (num_tokens - 1)


class StepCost:
    """``ms(num_tokens)`` of a step. Measured sizes are exponentially weighted means; others follow from their
    neighbours by the shape of the prior.
    """

    def __init__(self) -> None:
        self._ms: dict[int, float] = {}

    def record(self, num_tokens: int, ms: float) -> None:
        """Books a step. One that took several times as long as usual says more of the machine than of the size."""
        size = _size_of(num_tokens)
        known = self._ms.get(size)
        if known is None:
            self._ms[size] = ms
        else:
            self._ms[size] = known + _LEARNING_RATE * (min(ms, _OUTLIER * known) - known)

    def ms(self, num_tokens: int) -> float:
        """Expected milliseconds; in units of an unknown step while nothing was measured."""
        size = _size_of(num_tokens)
        if size in self._ms:
            return self._ms[size] * _prior(num_tokens) / _prior(size)
        sizes = sorted(self._ms)
        if not sizes:
            return _prior(num_tokens)
        right = bisect.bisect_left(sizes, size)
        if right in (0, len(sizes)):
            nearest = sizes[0 if right == 0 else -1]
            return self._ms[nearest] * _prior(num_tokens) / _prior(nearest)
        low, high = sizes[right - 1], sizes[right]
        share = (num_tokens - low) / (high - low)
        return self._ms[low] + share * (self._ms[high] - self._ms[low])


def _size_of(num_tokens: int) -> int:
    """The largest of the sizes that is not above ``num_tokens``."""
    return _SIZES[max(0, bisect.bisect_right(_SIZES, num_tokens) - 1)]
