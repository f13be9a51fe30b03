"""Linear least squares for a head's initial weights, which replaces minutes of gradient descent by a second.

The head works in the space of the target's final hidden state ``n`` (after the final norm), the input of the lm_head.
Two maps are fitted to some answers of the target:

* ``features of token i -> n of token i``, which is ``fc``;
* ``(embedding of token i + 1, n of token i) -> n of token i + 1, minus n of token i``, of the rank that the attention
  allows: with each row attending to itself, the values are its right factor and the output projection its left one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

_RIDGE = 1e-2


class Regression:
    """Least squares with a small ridge term, over rows that are added in parts."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.gram = torch.zeros(num_inputs, num_inputs)
        self.num_rows = 0
        self._cross = torch.zeros(num_inputs, num_outputs)

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Adds rows: inputs ``[num_rows, num_inputs]`` and outputs ``[num_rows, num_outputs]``, float32."""
        self.gram += inputs.T @ inputs
        self._cross += inputs.T @ outputs
        self.num_rows += len(inputs)

    def solve(self) -> torch.Tensor:
        """The fitted map, ``[num_inputs, num_outputs]``."""
        damped = self.gram.clone()
        damped.diagonal().add_(_RIDGE * damped.diagonal().mean() + torch.finfo(torch.float32).tiny)
        solution: torch.Tensor = torch.linalg.solve(damped, self._cross)
        return solution


@dataclass(frozen=True, slots=True)
class LowRankMap:
    """The factors of ``outputs @ values``, which maps inputs to outputs.

    Attributes:
        values: ``[rank, num_inputs]``, scaled to yield numbers of about 1.
        outputs: ``[num_outputs, rank]``
    """

    values: torch.Tensor
    outputs: torch.Tensor


def low_rank(fitted: Regression, rank: int, lm_head: torch.Tensor) -> LowRankMap:
    """The map of this rank with the least error in the logits (reduced rank regression)."""
    solution = fitted.solve()
    metric = lm_head.T @ lm_head
    metric.diagonal().add_(1e-3 * metric.diagonal().mean())
    root = torch.linalg.cholesky(metric)
    weighted = solution @ root
    directions = torch.linalg.eigh(weighted.T @ fitted.gram @ weighted).eigenvectors[:, -rank:]
    values = (weighted @ directions).T
    outputs = torch.linalg.solve_triangular(root.T, directions, upper=True)
    level = ((values @ fitted.gram * values).sum(dim=-1) / max(1, fitted.num_rows)).sqrt().clamp_min(1e-6)
    return LowRankMap(values / level[:, None], outputs * level)


def mean_square(parts: Iterable[torch.Tensor]) -> float:
    """The mean square of all numbers of all parts."""
    total, count = 0.0, 0
    for part in parts:
        total += float(part.float().square().sum())
        count += part.numel()
    return total / max(1, count)
