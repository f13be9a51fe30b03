"""Summary statistics of samples. Percentiles are exact, from all samples instead of buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 95, 99)
FEW_FOR_P99 = 100
"""With fewer samples, the p99 is close to the maximum."""
_SDS = 1.96
"""Standard deviations on both sides of a normal distribution that contain 95 % of it."""
_LEAST_FOR_INTERVALS = 8


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary statistics in milliseconds; all 0 without samples.

    Percentiles are interpolated linearly between the two nearest samples.

    Attributes:
        intervals: 95 % confidence intervals by name (``mean``, ``p50``, …). Left out where there are too few samples: a
            p95 needs 73 and a p99 381, since a bound is a percentile of the samples as well.
    """

    count: int = 0
    mean: float = 0.0
    min: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of_seconds(cls, values: Iterable[float | None], num_independent: int | None = None) -> Summary:
        """Summarises values in seconds, without ``None`` for missing ones.

        Args:
            num_independent: number of independent values among them, for the intervals; ``None`` means all.
        """
        samples = 1000.0 * np.array([value for value in values if value is not None], dtype=np.float64)
        if not samples.size:
            return cls()
        p50, p95, p99 = (float(value) for value in np.percentile(samples, PERCENTILES))
        count = int(samples.size)
        intervals = _intervals(samples, min(count, num_independent or count))
        return cls(count, float(samples.mean()), float(samples.min()), p50, p95, p99, float(samples.max()), intervals)


def _intervals(samples: NDArray[np.float64], num_independent: int) -> dict[str, tuple[float, float]]:
    """Percentiles by order statistics: as many samples lie below one as a binomial distribution says."""
    if num_independent < _LEAST_FOR_INTERVALS:
        return {}
    sds = _SDS * (1 + 1.2 / (num_independent - 1))  # about Student's t
    mean, error = float(samples.mean()), sds * float(samples.std(ddof=1)) / sqrt(num_independent)
    found = {"mean": (mean - error, mean + error)}
    for rank in PERCENTILES:
        error = 100 * _SDS * sqrt(rank / 100 * (1 - rank / 100) / num_independent)
        if error <= min(rank, 100 - rank):
            low, high = np.percentile(samples, [rank - error, rank + error])
            found[f"p{rank}"] = (float(low), float(high))
    return found


def percentile_ms(values: Iterable[float | None], share: float) -> float:
    """A percentile, in milliseconds, of values in seconds without ``None``; 0 without values."""
    samples = [1000.0 * value for value in values if value is not None]
    return percentile(samples, share) if samples else 0.0


def percentile(samples: Sequence[float], share: float) -> float:
    """A linearly interpolated percentile; ``share`` is from 0 to 100."""
    return float(np.percentile(samples, share))
