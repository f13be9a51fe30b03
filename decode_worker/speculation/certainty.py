"""What a draft network's own probabilities say about the acceptance of its guesses, before experience says more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from baton.engine.device.downloads import fetch, is_on_host

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


def likeliest(logits: torch.Tensor, to_target: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[int], list[float]]:
    """The token of each row's highest logit, and that token's probability: NaN where a logit is NaN or +inf.

    Args:
        logits: ``[num_rows, num_columns]``
        to_target: maps columns, int64 ``[num_rows]``, to token ids.
    """
    values = logits.float()
    if not is_on_host(values):
        highest, columns = values.max(dim=-1)
        sums = (values - highest.unsqueeze(-1)).exp_().sum(dim=-1)
        token_ids, probabilities = fetch(to_target(columns), sums.reciprocal())
        return token_ids, probabilities
    rows = values.numpy()  # which needs a fraction of the time that torch takes for a few rows
    with np.errstate(invalid="ignore", over="ignore"):
        best = 1.0 / np.exp(rows - rows.max(axis=-1, keepdims=True)).sum(axis=-1)
    return to_target(torch.from_numpy(rows.argmax(axis=-1))).tolist(), best.tolist()
