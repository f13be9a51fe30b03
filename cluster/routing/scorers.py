"""Scorers: how good each route is for a request, in [0, 1]; 1 is best. Weights are in ``routing.scorers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from cluster.routing.routing_contracts import Candidates, Floats, Scorer, WorkerSnapshot

_SLOPE = 1.702
"""The logistic function of 1.702·x is within 0.01 of the normal distribution function of x (Camilli, 1994)."""
_FARTHEST = 30.0
_SMALLEST_SD_MS = 1e-3


class SLOHeadroom:
    """The probability of meeting the request's TTFT target, and the TPOT targets of it and of its decode neighbours.

    Outcomes are assumed to be normal around the predictions. The request and its neighbours share the worker's steps,
    so the smaller of their TPOT probabilities counts instead of the product.
    """

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
    """The probability that a normal outcome is at most ``limit_ms``, which may be infinite."""
    distance = (np.asarray(limit_ms) - mean_ms) / np.maximum(sd_ms, _SMALLEST_SD_MS)
    return np.asarray(1 / (1 + np.exp(-_SLOPE * np.clip(distance, -_FARTHEST, _FARTHEST))))


class PredictedTTFT:
    """Prefers an early first token: ``1 / (1 + TTFT / target)``, which is one half at the target.

    Relative to the target, differences far above or below it matter little.
    """

    def score(self, candidates: Candidates) -> Floats:
        target_ms = candidates.request.slo.ttft_s * 1e3
        return 1 / (1 + candidates.forecasts.ttft_ms / target_ms)


class PredictedTPOT:
    """Prefers fast decoding: ``1 / (1 + TPOT / target)``.

    The delay of other sequences by a local prefill is charged to the request as if it were its own. So a local prefill
    wins as long as it delays others by less than the hand-off would take.
    """

    def score(self, candidates: Candidates) -> Floats:
        forecasts, target_ms = candidates.forecasts, candidates.request.slo.tpot_s * 1e3
        charged = forecasts.disturbance_ms / max(1.0, candidates.request.output_tokens - 1)
        return 1 / (1 + (forecasts.tpot_ms + charged) / target_ms)


class PrefixAffinity:
    """Prefers workers that hold the prompt's beginning: the cached share of the prompt.

    Predictions include the time saved for this request. This scorer adds the time saved for later requests, and keeps a
    conversation on one worker.
    """

    def score(self, candidates: Candidates) -> Floats:
        num_tokens = max(1, candidates.request.num_prompt_tokens)

        def share(worker: WorkerSnapshot) -> float:
            return min(1.0, worker.cached_tokens / num_tokens)

        return candidates.by_computing(
            [share(worker) for worker in candidates.prefill_workers],
            [share(worker) for worker in candidates.decode_workers],
        )


class QueueDepth:
    """Prefers short queues: ``1 / (1 + prompts ahead)`` on the worker that computes the prompt."""

    def score(self, candidates: Candidates) -> Floats:
        return candidates.by_computing(
            [1 / (1 + worker.queue.prompts) for worker in candidates.prefill_workers],
            [1 / (1 + worker.queue.prompts) for worker in candidates.decode_workers],
        )


class KVUse:
    """Prefers decode workers with room: the free share of the KV cache once the request is added.

    If the cache's size is unknown, the free share of ``max_num_seqs`` is used.
    """

    def score(self, candidates: Candidates) -> Floats:
        num_tokens = candidates.request.num_prompt_tokens
        return candidates.by_decode([_free_share(worker, num_tokens) for worker in candidates.decode_workers])


def _free_share(worker: WorkerSnapshot, num_tokens: int) -> float:
    if worker.kv_tokens > 0:
        used = (worker.context_tokens + num_tokens) / worker.kv_tokens
    else:
        used = (worker.batch + 1) / max(1, worker.max_num_seqs)
    return min(1.0, max(0.0, 1.0 - used))


class LeastLoaded:
    """Prefers workers with fewer requests: the mean of ``1 / (1 + in_flight)`` over the workers of the route."""

    def score(self, candidates: Candidates) -> Floats:
        decode = candidates.by_decode([_freedom(worker) for worker in candidates.decode_workers])
        prefill = candidates.by_prefill([_freedom(worker) for worker in candidates.prefill_workers])
        return np.where(candidates.is_local, decode, (prefill + decode) / 2)


def _freedom(worker: WorkerSnapshot) -> float:
    return 1 / (1 + worker.in_flight)


SCORERS: Mapping[str, Callable[[], Scorer]] = {
    "slo_headroom": SLOHeadroom,
    "predicted_ttft": PredictedTTFT,
    "predicted_tpot": PredictedTPOT,
    "prefix_affinity": PrefixAffinity,
    "queue_depth": QueueDepth,
    "kv_use": KVUse,
    "least_loaded": LeastLoaded,
}
"""Scorers by their names in the configuration. A new one also needs a weight in ``DEFAULT_WEIGHTS``."""
