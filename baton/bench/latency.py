"""Samples of a quantity in a few figures. Percentiles are exact: they come from all samples, not from buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """Milliseconds; all 0 when there are no samples.

    Percentiles are interpolated linearly between the two nearest samples.
    """

    count: int = 0
    mean: float = 0.0
    min: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of_seconds(cls, values: Iterable[float | None]) -> Summary:
        """Leaves out None, which stands for a quantity that a sample does not have."""
        samples = 1000.0 * np.array([value for value in values if value is not None], dtype=np.float64)
        if not samples.size:
            return cls()
        p50, p95, p99 = (float(value) for value in np.percentile(samples, PERCENTILES))
        return cls(int(samples.size), float(samples.mean()), float(samples.min()), p50, p95, p99, float(samples.max()))


def percentile_ms(values: Iterable[float | None], share: float) -> float:
    """One percentile of values in seconds, in milliseconds; None is left out, and of no values it is 0."""
    samples = [1000.0 * value for value in values if value is not None]
    return percentile(samples, share) if samples else 0.0


def percentile(samples: Sequence[float], share: float) -> float:
    """Of any samples; ``share`` is from 0 to 100. Interpolated linearly."""
    return float(np.percentile(samples, share))
