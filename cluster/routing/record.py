"""What a timeline says of how its workers were chosen. Built for every request, so it takes some ten microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cluster.routing.base import Candidates, Floats, Ints

_SHOWN = 5
_ROOM = "room"
"""Of routes that go behind others whatever their scores; the name of no scorer."""


def routing_record(
    candidates: Candidates,
    chosen: int,
    scores: Mapping[str, Floats],
    weights: Mapping[str, float],
    totals: Floats,
    num_routes: int,
    among: Ints,
) -> dict[str, Any]:
    """JSON-ready: the best candidates, and the one that was chosen, with scores and predictions.

    Args:
        scores: by scorer, each ``[num_candidates]``.
        totals: weighted sums of these.
        num_routes: that there were, weighed or not.
        among: indices of those that could be taken; the others had no room.
    """
    count = len(candidates)
    best: Sequence[int] = range(count)
    if count > _SHOWN:
        best = np.argpartition(-totals, _SHOWN - 1)[:_SHOWN].tolist()
    shown = sorted({chosen, *best}, key=lambda index: (index != chosen, -totals[index]))
    entries = [_candidate(candidates, index, chosen, scores, weights, totals) for index in shown]
    if len(among) < count:
        for index, entry in zip(shown, entries, strict=True):
            if index not in among:
                entry["lost_on"] = _ROOM
    return {"num_routes": num_routes, "num_weighed": count, "weights": dict(weights), "candidates": entries}


def _candidate(
    candidates: Candidates,
    index: int,
    chosen: int,
    scores: Mapping[str, Floats],
    weights: Mapping[str, float],
    totals: Floats,
) -> dict[str, Any]:
    route, forecasts = candidates.route(index), candidates.forecasts
    computing = route.prefill if route.prefill is not None else route.decode
    entry: dict[str, Any] = {
        "prefill": route.prefill.worker_id if route.prefill is not None else None,
        "decode": route.decode.worker_id,
        "chosen": index == chosen,
        "score": round(float(totals[index]), 4),
        "scores": {name: round(float(values[index]), 4) for name, values in scores.items()},
        "cached_tokens": computing.cached_tokens,
        "ttft_ms": round(float(forecasts.ttft_ms[index]), 2),
        "ttft_sd_ms": round(float(forecasts.ttft_sd_ms[index]), 2),
        "wait_ms": round(float(forecasts.wait_ms[index]), 2),
        "tpot_ms": round(float(forecasts.tpot_ms[index]), 3),
        "tpot_sd_ms": round(float(forecasts.tpot_sd_ms[index]), 3),
        "transfer_ms": round(float(forecasts.transfer_ms[index]), 2),
    }
    if index != chosen and scores:
        # What spoke most for the one that was chosen instead.
        gaps = {name: weights[name] * float(values[chosen] - values[index]) for name, values in scores.items()}
        worst = max(gaps, key=lambda name: gaps[name])
        if gaps[worst] > 0:
            entry["lost_on"] = worst
    return entry
