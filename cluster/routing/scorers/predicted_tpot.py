"""Prefers fast decoding: ``1 / (1 + TPOT / target)``.

The delay that a prompt computed here brings to those that decode here is charged to the request, as if it were its own:
that makes a local prefill worth it as long as it delays others by less than the hand-off would take.
"""

from __future__ import annotations

from cluster.routing.base import Candidates, Floats


class PredictedTPOT:
    """Implements :class:`cluster.routing.base.Scorer`."""

    def score(self, candidates: Candidates) -> Floats:
        forecasts, target_ms = candidates.forecasts, candidates.request.slo.tpot_s * 1e3
        charged = forecasts.disturbance_ms / max(1.0, candidates.request.output_tokens - 1)
        return 1 / (1 + (forecasts.tpot_ms + charged) / target_ms)
