"""Separates steps that took far too long from steps that are slow, so that estimates do not learn from compilations.

A kernel that is compiled while a step waits makes that step take seconds instead of milliseconds. It happens once for
each variant of the kernel, so the next step of the same kind is back to normal. A machine that became slower stays so.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from statistics import median_low
from typing import Generic, TypeVar

from baton.core.step_samples import StepSample

OUTLIER_FACTOR = 10.0
"""A step that takes more than this many times what was expected is an outlier."""
TRUSTED_SAMPLES = 8
"""An expectation from fewer samples cannot identify outliers."""
_CONFIRMATIONS = 3
_NEAR = 4

T = TypeVar("T")


class OutlierGuard(Generic[T]):
    """Holds outliers back until several in a row, all of one kind, show that steps of this kind take that long."""

    def __init__(self) -> None:
        self._held: dict[Hashable, list[T]] = {}

    def admit(self, kind: Hashable, sample: T, ratio: float) -> list[T]:
        """Takes a new sample and returns those to learn from now, oldest first.

        Args:
            kind: equal for samples that cost about the same.
            ratio: measured time over expected time.
        """
        if ratio <= OUTLIER_FACTOR:
            self._held.pop(kind, None)
            return [sample]
        held = self._held.setdefault(kind, [])
        held.append(sample)
        return [] if len(held) < _CONFIRMATIONS else self._held.pop(kind)


def is_outlier(index: int, samples: Sequence[StepSample]) -> bool:
    """Whether a sample took more than :data:`OUTLIER_FACTOR` times as long as the median of similar samples.

    Similar samples have a quarter to four times its size; prompts are compared with prompts, decoding with decoding.
    The time of a smaller sample is scaled up to its size. A sample without similar ones is no outlier.
    """
    sample = samples[index]
    size = _size(sample)
    expected = [
        other.ms * max(1.0, size / _size(other))
        for place, other in enumerate(samples)
        if place != index
        and bool(other.prompt_tokens) == bool(sample.prompt_tokens)
        and size <= _NEAR * _size(other)
        and _size(other) <= _NEAR * size
    ]
    return bool(expected) and sample.ms > OUTLIER_FACTOR * median_low(expected)


def _size(sample: StepSample) -> int:
    return max(1, sample.prompt_tokens or sample.sequences)
