"""What a draft network's own probabilities say about the acceptance of its guesses, before experience says more."""

from __future__ import annotations

import numpy as np
import torch

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


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Of each row the column of its highest logit, int64 ``[num_rows]``, and that column's probability.

    What is no number in the logits makes the probability none, too.
    """
    values = logits.float().cpu().numpy()  # numpy needs a fraction of the time that torch takes for a few rows
    columns = values.argmax(axis=-1)
    with np.errstate(invalid="ignore"):
        best = 1.0 / np.exp(values - values.max(axis=-1, keepdims=True)).sum(axis=-1)
    return torch.from_numpy(columns).to(logits.device), best.tolist()
