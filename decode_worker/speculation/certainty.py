"""What a draft network's own probabilities say about the acceptance of its guesses, before experience says more."""

from __future__ import annotations

_LIMITS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
_EDGES = (0.0, *_LIMITS, 1.0)
# Networks are surer of themselves than they are right.
_PRIOR_FACTOR = 0.8


def bucket_of(probability: float) -> int:
    """Guesses of one bucket are about equally likely."""
    return sum(probability >= limit for limit in _LIMITS)


def prior_of(bucket: int) -> float:
    """The share of a bucket's guesses that is likely to be accepted."""
    return _PRIOR_FACTOR * (_EDGES[bucket] + _EDGES[bucket + 1]) / 2
