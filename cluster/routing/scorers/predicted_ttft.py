"""Prefers an early first token: ``1 / (1 + TTFT / target)``, one half when the target is just met.

Measured by the target, what is far too late or early anyway makes little difference.
"""

from __future__ import annotations

from cluster.routing.base import Candidates, Floats


class PredictedTTFT:
    """Implements :class:`cluster.routing.base.Scorer`."""

    def score(self, candidates: Candidates) -> Floats:
        target_ms = candidates.request.slo.ttft_s * 1e3
        return 1 / (1 + candidates.forecasts.ttft_ms / target_ms)
