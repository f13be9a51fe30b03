"""Summary statistics of samples. Percentiles are exact, from all samples instead of buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 95, 99)
FEW_FOR_P99 = 100
"""With fewer samples, the p99 is close to the maximum."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary statistics in milliseconds; all 0 without samples.

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
        """Summarises values in seconds, without ``None`` for missing ones."""
        samples = 1000.0 * np.array([value for value in values if value is not None], dtype=np.float64)
        if not samples.size:
            return cls()
        p50, p95, p99 = (float(value) for value in np.percentile(samples, PERCENTILES))
        return cls(int(samples.size), float(samples.mean()), float(samples.min()), p50, p95, p99, float(samples.max()))


def percentile_ms(values: Iterable[float | None], share: float) -> float:
    """A percentile, in milliseconds, of values in seconds without ``None``; 0 without values."""
    samples = [1000.0 * value for value in values if value is not None]
    return percentile(samples, share) if samples else 0.0


def percentile(samples: Sequence[float], share: float) -> float:
    """A linearly interpolated percentile; ``share`` is from 0 to 100."""
    return float(np.percentile(samples, share))
