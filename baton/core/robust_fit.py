"""Robust least squares, and the window of samples for a fit.

``ms ≈ features · coefficients``, with no coefficient below zero. Residuals are relative to the prediction, so short
steps count as much as long ones. The fit is iteratively reweighted with Huber's weights (P. J. Huber, Robust Estimation
of a Location Parameter, 1964) and regularised towards a prior.

The window keeps the newest samples of every kind, so common kinds do not displace rare ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import frexp
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.core.non_negative import solve_non_negative

Floats = npt.NDArray[np.float64]

_HUBER = 1.345
"""Standard deviations beyond which a residual counts less; 95 % efficient for normal noise."""
_MAD_TO_SD = 1.4826
_SMALLEST_SD, _LARGEST_SD = 0.02, 0.5
_ROUNDS = 3
_SMALLEST_MS = 1e-4


def fit(features: Floats, ms: Floats, weights: Floats, prior: Floats, prior_weight: float) -> Floats:
    """Fits the coefficients, ``[num_features]``.

    Args:
        features: ``[num_samples, num_features]``, not negative.
        ms: ``[num_samples]``, above zero.
        weights: ``[num_samples]``, above zero; 1 is full weight.
        prior: ``[num_features]``, above zero.
        prior_weight: weight of the prior for each coefficient, in samples.
    """
    coefficients = prior
    for _ in range(_ROUNDS):
        predicted = np.maximum(features @ coefficients, _SMALLEST_MS)
        residuals = ms / predicted - 1.0
        sd = min(max(_MAD_TO_SD * float(np.median(np.abs(residuals))), _SMALLEST_SD), _LARGEST_SD)
        huber = np.minimum(1.0, _HUBER * sd / np.maximum(np.abs(residuals), 1e-12))
        # In units of the prior, so that regularisation does not depend on a coefficient's scale.
        rows = features * prior / predicted[:, None]
        weighted = rows * (weights * huber)[:, None]
        matrix = rows.T @ weighted + prior_weight * np.eye(len(prior))
        vector = weighted.T @ (ms / predicted) + prior_weight
        coefficients = prior * solve_non_negative(matrix, vector)
    return coefficients


_PER_CELL = 12
_MAX_CELLS = 24
"""Limit for each set of nonzero features, such as prompts alone or decoding alone."""
_HALF_LIFE_S = 120.0
_HALF_LIFE_SAMPLES = 96.0
_SMALLEST_WEIGHT = 0.02
"""Minimum weight of old samples, since rare kinds may have no newer ones."""

Features = tuple[float, ...]


class _Row(NamedTuple):
    added_s: float
    number: int
    ms: float
    features: Features


@dataclass(slots=True)
class _Mixture:
    """Samples with the same set of nonzero features."""

    cells: OrderedDict[tuple[int, ...], deque[_Row]] = field(default_factory=OrderedDict)
    num_added: int = 0

    def rows(self) -> Iterator[tuple[float, int, float, Features]]:
        """Yields (time added, number of newer samples, milliseconds, features) of each sample."""
        for cell in self.cells.values():
            for row in cell:
                yield row.added_s, self.num_added - row.number, row.ms, row.features


class SampleWindow:
    """Keeps a few samples per cell of feature sizes in powers of two, and the most recently used cells."""

    def __init__(self) -> None:
        self._mixtures: dict[tuple[bool, ...], _Mixture] = {}

    def add(self, features: Features, ms: float, now_s: float) -> None:
        mixture = self._mixtures.setdefault(tuple(value > 0 for value in features), _Mixture())
        key = tuple(frexp(value)[1] for value in features)
        cell = mixture.cells.get(key)
        if cell is None:
            cell = mixture.cells[key] = deque(maxlen=_PER_CELL)
            if len(mixture.cells) > _MAX_CELLS:
                mixture.cells.popitem(last=False)
        else:
            mixture.cells.move_to_end(key)
        mixture.num_added += 1
        cell.append(_Row(now_s, mixture.num_added, ms, features))

    def table(self, now_s: float) -> tuple[Floats, Floats, Floats]:
        """Features ``[n, k]``, milliseconds ``[n]`` and weights ``[n]``.

        Weights halve with age, and with the number of newer samples of the same mixture.
        """
        rows = (row for mixture in self._mixtures.values() for row in mixture.rows())
        times, num_newer, ms, features = zip(*rows, strict=True)
        half_lives = np.maximum(now_s - np.array(times), 0.0) / _HALF_LIFE_S
        half_lives += np.array(num_newer) / _HALF_LIFE_SAMPLES
        weights = np.maximum(0.5**half_lives, _SMALLEST_WEIGHT)
        return np.array(features), np.array(ms), weights
