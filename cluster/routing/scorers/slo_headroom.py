"""The probability that promises are kept: the request's TTFT, and the TPOT of it and of those that it decodes with.

Outcomes are taken to be normal around the predictions. The request and its neighbours share the worker's steps, so the
less probable of their TPOTs counts, and not the product.
"""

from __future__ import annotations

import numpy as np

from cluster.routing.base import Candidates, Floats

_SLOPE = 1.702
"""The logistic function of so many times x is within 0.01 of the normal distribution's (Camilli, 1994)."""
_FARTHEST = 30.0
_SMALLEST_SD_MS = 1e-3


class SLOHeadroom:
    """Implements :class:`cluster.routing.base.Scorer`."""

    def score(self, candidates: Candidates) -> Floats:
        forecasts, slo = candidates.forecasts, candidates.request.slo
        ttft = probability_below(slo.ttft_s * 1e3, forecasts.ttft_ms, forecasts.ttft_sd_ms)
        if candidates.request.max_tokens == 1:
            own = np.ones(len(candidates))
        else:
            own = probability_below(slo.tpot_s * 1e3, forecasts.tpot_ms, forecasts.tpot_sd_ms)
        targets = candidates.by_decode([worker.tpot_target_s * 1e3 for worker in candidates.decode_workers])
        spread = forecasts.tpot_sd_ms / np.maximum(forecasts.tpot_ms, _SMALLEST_SD_MS)
        neighbours = forecasts.neighbour_tpot_ms
        return ttft * np.minimum(own, probability_below(targets, neighbours, spread * neighbours))


def probability_below(limit_ms: Floats | float, mean_ms: Floats, sd_ms: Floats) -> Floats:
    """That a normal outcome is not above a limit, which may be infinite."""
    distance = (np.asarray(limit_ms) - mean_ms) / np.maximum(sd_ms, _SMALLEST_SD_MS)
    return np.asarray(1 / (1 + np.exp(-_SLOPE * np.clip(distance, -_FARTHEST, _FARTHEST))))
