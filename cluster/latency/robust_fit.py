"""Least squares that outliers cannot bend: ``ms ≈ features · coefficients``, no coefficient below zero.

Residuals are relative to the prediction, so that short steps count as much as long ones. Iteratively reweighted with
Huber's weights (P. J. Huber, Robust Estimation of a Location Parameter, 1964), pulled towards a prior.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.core.non_negative import solve_non_negative

Floats = npt.NDArray[np.float64]

_HUBER = 1.345
"""Standard deviations beyond which a residual counts less; 95 % efficient where nothing is wrong with the noise."""
_MAD_TO_SD = 1.4826
_SMALLEST_SD, _LARGEST_SD = 0.02, 0.5
_ROUNDS = 5
_SMALLEST_MS = 1e-4


def fit(features: Floats, ms: Floats, weights: Floats, prior: Floats, prior_weight: float) -> Floats:
    """The coefficients.

    Args:
        features: ``[num_samples, num_features]``, not negative.
        ms: ``[num_samples]``, above zero.
        weights: ``[num_samples]``, above zero; 1 for a sample that counts in full.
        prior: ``[num_features]``, above zero.
        prior_weight: how many samples the prior is worth, for each coefficient.
    """
    coefficients = prior
    for _ in range(_ROUNDS):
        predicted = np.maximum(features @ coefficients, _SMALLEST_MS)
        residuals = ms / predicted - 1.0
        sd = min(max(_MAD_TO_SD * float(np.median(np.abs(residuals))), _SMALLEST_SD), _LARGEST_SD)
        huber = np.minimum(1.0, _HUBER * sd / np.maximum(np.abs(residuals), 1e-12))
        # In units of the prior, so that a coefficient's size says nothing about how hard it is to move.
        rows = features * prior / predicted[:, None]
        weighted = rows * (weights * huber)[:, None]
        matrix = rows.T @ weighted + prior_weight * np.eye(len(prior))
        vector = weighted.T @ (ms / predicted) + prior_weight
        coefficients = prior * solve_non_negative(matrix, vector)
    return coefficients
