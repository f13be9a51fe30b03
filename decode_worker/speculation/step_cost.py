"""The cost of a forward by its sequences and tokens, learned from the steps that the worker runs anyway."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
_LEARNING_RATE = 0.15
# A step that takes more than this many times the estimate is ignored as a disturbance of the machine. If a step takes
# less than the estimate by this factor, the estimate was the outlier: a worker's first passes are cold.
_OUTLIER = 2.0
# The same for the first step of a size, which may be cold: with its full cost the size would never be tried again.
_COLD_OUTLIER = 1.5
# Sizes that did not occur for this many steps are forgotten, since the load of the machine changes.
_MEMORY_STEPS = 4096
# Before anything is measured: a forward of n tokens costs 1 + 0.025 (n - 1) times a forward of one, which is about what
# memory-bound decoding costs on CPUs and GPUs alike.
_PRIOR_SLOPE = 0.025


def _prior(num_tokens: float) -> float:
    return 1.0 + _PRIOR_SLOPE * (num_tokens - 1)


@dataclass(slots=True)
class _Size:
    """
    Attributes:
        ms: duration of a step of this size.
        count: number of measured steps of this size.
        newest: number of the latest one.
    """

    ms: float
    count: int
    newest: int


class StepCost:
    """``ms(num_sequences, num_tokens)`` of a step.

    Measured sizes are exponentially weighted means; others follow from their neighbours by the shape of the prior.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._curves: dict[int, tuple[list[int], list[float]]] = {}
        self._num_steps = 0

    def record(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        """Learns from a step."""
        self._num_steps += 1
        key = (_size_of(num_sequences), _size_of(num_tokens))
        known = self._sizes.get(key)
        if known is None:
            believed = min(ms, _COLD_OUTLIER * self.ms(num_sequences, num_tokens)) if self._sizes else ms
            self._sizes[key] = _Size(believed, 1, self._num_steps)
        else:
            known.count += 1
            known.newest = self._num_steps
            usual = min(known.ms, _OUTLIER * ms)
            known.ms = usual + max(_LEARNING_RATE, 1 / known.count) * (min(ms, _OUTLIER * usual) - usual)
        if self._num_steps % _MEMORY_STEPS == 0:
            self._forget()
        self._curves.clear()

    def ms(self, num_sequences: int, num_tokens: float) -> float:
        """The expected milliseconds; before any measurement, multiples of an unknown unit."""
        if not self._sizes:
            return _prior(num_tokens)
        tokens, ms = self._curve(num_sequences)
        right = bisect.bisect_left(tokens, num_tokens)
        if right == 0 or right == len(tokens):
            edge = min(right, len(tokens) - 1)
            return ms[edge] * _prior(num_tokens) / _prior(tokens[edge])
        share = (num_tokens - tokens[right - 1]) / (tokens[right] - tokens[right - 1])
        return ms[right - 1] + share * (ms[right] - ms[right - 1])

    def _curve(self, num_sequences: int) -> tuple[list[int], list[float]]:
        """Measured numbers of tokens, ascending, and their costs with about this many sequences."""
        found = self._curves.get(num_sequences)
        if found is None:
            batch = _nearest((batch for batch, _ in self._sizes), _size_of(num_sequences))
            known = sorted((tokens, size.ms) for (own, tokens), size in self._sizes.items() if own == batch)
            # More tokens never cost less; a contrary measurement comes from a disturbance of the smaller step.
            costs = [ms for _, ms in known]
            for index in reversed(range(len(costs) - 1)):
                costs[index] = min(costs[index], costs[index + 1])
            found = self._curves[num_sequences] = ([tokens for tokens, _ in known], costs)
        return found

    def _forget(self) -> None:
        newest = max(size.newest for size in self._sizes.values())
        self._sizes = {key: size for key, size in self._sizes.items() if newest - size.newest < _MEMORY_STEPS}


def _nearest(sizes: Iterable[int], value: int) -> int:
    return min(set(sizes), key=lambda size: (abs(size - value), size))


def _size_of(value: int) -> int:
    """The smallest class that holds ``value``."""
    return _SIZES[min(bisect.bisect_left(_SIZES, value), len(_SIZES) - 1)]
