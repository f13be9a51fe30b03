"""A routing profile: filters for each pool, then weighted scorers and a picker for the routes between them.

All routes are scored while they are few, otherwise those between a sample of each pool. Every decision leaves a record
in the request's timeline.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from cluster.latency.estimates import RouteForecast
from cluster.routing.filters import FILTERS
from cluster.routing.pickers import PICKERS
from cluster.routing.request_predictions import RouteForecaster
from cluster.routing.routing_config import RoutingConfig
from cluster.routing.routing_contracts import (
    LOCAL,
    Bools,
    Candidates,
    Filter,
    Floats,
    Ints,
    Picker,
    Preference,
    RouteDecision,
    RoutingRequest,
    Scorer,
    WorkerSnapshot,
)
from cluster.routing.scorers import SCORERS

_BEST_HOLDERS = 2


class LocalPrefill(StrEnum):
    """Whether decode workers may compute prompts themselves."""

    AUTO = "auto"
    """Decode workers compute a prompt if the scores prefer it."""
    NEVER = "never"
    """Decode workers compute prompts only to continue requests whose worker was lost."""
    ALWAYS = "always"
    """Decode workers compute all prompts, and there are no hand-offs."""


class Scan:
    """Limits the number of routes to score.

    Args:
        limit: largest number of worker pairs for which every route is scored.
        sample: workers of each pool beyond that limit. They are drawn at random, but always include the workers that
            hold most of the prompt.
    """

    def __init__(self, limit: int, sample: int, rng: random.Random) -> None:
        self._limit = limit
        self._sample = sample
        self._rng = rng

    def narrow(
        self, prefill: Sequence[WorkerSnapshot], decode: Sequence[WorkerSnapshot]
    ) -> tuple[Sequence[WorkerSnapshot], Sequence[WorkerSnapshot]]:
        """The workers whose routes are scored."""
        if len(prefill) * len(decode) <= self._limit:
            return prefill, decode
        return self._draw(prefill), self._draw(decode)

    def _draw(self, workers: Sequence[WorkerSnapshot]) -> Sequence[WorkerSnapshot]:
        if len(workers) <= self._sample:
            return workers
        by_cached = sorted(workers, key=lambda worker: worker.cached_tokens, reverse=True)
        holders = [worker for worker in by_cached[: min(_BEST_HOLDERS, self._sample)] if worker.cached_tokens > 0]
        others = self._rng.sample(by_cached[len(holders) :], self._sample - len(holders))
        return [*holders, *others]


def count_routes(num_prefill: int, num_decode: int, local: LocalPrefill) -> int:
    """The number of pairs and local routes."""
    num_pairs = 0 if local is LocalPrefill.ALWAYS else num_prefill * num_decode
    return num_pairs + (0 if local is LocalPrefill.NEVER else num_decode)


def routes(num_prefill: int, num_decode: int, local: LocalPrefill) -> tuple[Ints, Ints]:
    """Indices of the workers of every route, each ``[num_routes]``; local routes come last."""
    prefill = np.repeat(np.arange(num_prefill), num_decode)
    decode = np.tile(np.arange(num_decode), num_prefill)
    alone = np.arange(num_decode)
    if local is LocalPrefill.NEVER:
        return prefill, decode
    if local is LocalPrefill.ALWAYS:
        return np.full(num_decode, LOCAL), alone
    return np.concatenate([prefill, np.full(num_decode, LOCAL)]), np.concatenate([decode, alone])


def compatible(
    prefill_workers: Sequence[WorkerSnapshot], decode_workers: Sequence[WorkerSnapshot], prefill: Ints, decode: Ints
) -> tuple[Ints, Ints]:
    """The routes whose two workers can hand KV over, in the form of :func:`routes`."""
    if len({worker.layout for worker in (*prefill_workers, *decode_workers)}) == 1:
        return prefill, decode
    computing = np.array([*(worker.layout for worker in prefill_workers), ""])[prefill]
    keeps = (prefill == LOCAL) | (computing == np.array([worker.layout for worker in decode_workers])[decode])
    return prefill[keeps], decode[keeps]


class RoutingProfile:
    """Implements :class:`cluster.routing.routing_contracts.RouteChooser`.

    Args:
        scorers: scorers by name.
        weights: weight of each scorer.
        observe: called with the name and the seconds of each scorer.
        timer: seconds, to time the scorers.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        scorers: Mapping[str, Scorer],
        weights: Mapping[str, float],
        picker: Picker,
        forecaster: RouteForecaster,
        scan: Scan,
        local_prefill: LocalPrefill = LocalPrefill.AUTO,
        observe: Callable[[str, float], None] | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._filters = tuple(filters)
        self._scorers = dict(scorers)
        self._weights = {name: weights[name] for name in self._scorers}
        self._picker = picker
        self._forecaster = forecaster
        self._scan = scan
        self._local_prefill = local_prefill
        self._observe = observe
        self._timer = timer

    def choose(
        self,
        prefill: Sequence[WorkerSnapshot],
        decode: Sequence[WorkerSnapshot],
        request: RoutingRequest,
        preferred: Preference | None = None,
    ) -> RouteDecision | None:
        """Chooses a route; ``None`` if a pool has no worker for the request."""
        local = LocalPrefill.ALWAYS if request.is_resumed else self._local_prefill
        prefill = [] if local is LocalPrefill.ALWAYS else self._filter(prefill, request)
        if request.is_resumed:
            decode = [worker for worker in decode if worker.layout == request.layout]
        decode = self._filter(decode, request)
        if not decode or (not prefill and local is LocalPrefill.NEVER):
            return None
        num_routes = count_routes(len(prefill), len(decode), local)
        prefill, decode = self._scan.narrow(prefill, decode)
        prefill_index, decode_index = compatible(prefill, decode, *routes(len(prefill), len(decode), local))
        if not len(decode_index):
            return None
        forecasts = self._forecaster.forecast(prefill, decode, prefill_index, decode_index, request)
        candidates = Candidates(request, prefill, decode, prefill_index, decode_index, forecasts)
        scores = self._score(candidates) if self._picker.needs_scores else {}
        totals = np.zeros(len(candidates))
        for name, values in scores.items():
            totals += self._weights[name] * values
        limits = preferred(candidates) if preferred is not None else {}
        among = _within(limits, len(candidates))
        chosen = self._picker.pick(candidates, totals, among)
        record = routing_record(candidates, chosen, scores, self._weights, totals, num_routes, limits)
        return _decision(candidates, chosen, record)

    def _filter(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> Sequence[WorkerSnapshot]:
        for policy in self._filters:
            workers = policy.filter(workers, request)
        return workers

    def _score(self, candidates: Candidates) -> dict[str, Floats]:
        scores, began_s = {}, self._timer()
        for name, scorer in self._scorers.items():
            scores[name] = scorer.score(candidates)
            ended_s = self._timer()
            if self._observe is not None:
                self._observe(name, ended_s - began_s)
            began_s = ended_s
        return scores


def _within(limits: Mapping[str, Bools], num_routes: int) -> Ints:
    """Indices of the routes that keep all limits, or of all routes if none does."""
    found = np.flatnonzero(np.logical_and.reduce(list(limits.values()))) if limits else np.arange(num_routes)
    return found if len(found) else np.arange(num_routes)


def _decision(candidates: Candidates, chosen: int, record: Mapping[str, object]) -> RouteDecision:
    forecasts, route = candidates.forecasts, candidates.route(chosen)
    ttft_ms, tpot_ms = float(forecasts.ttft_ms[chosen]), float(forecasts.tpot_ms[chosen])
    computing = route.prefill if route.prefill is not None else route.decode
    return RouteDecision(
        prefill_id=route.prefill.worker_id if route.prefill is not None else None,
        decode_id=route.decode.worker_id,
        cached_tokens=min(computing.cached_tokens, candidates.request.num_prompt_tokens - 1),
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        idle_ttft_ms=float(forecasts.idle_ttft_ms.min()),
        idle_tpot_ms=float(forecasts.idle_tpot_ms.min()),
        wait_ms=float(forecasts.wait_ms[chosen]),
        has_capacity=route.decode.has_capacity(candidates.request.num_tokens),
        record=record,
        forecast=RouteForecast(
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            before_ms=forecasts.before_ms,
            model_ttft_ms=(ttft_ms - forecasts.before_ms) / float(forecasts.ttft_factor[chosen]),
            model_tpot_ms=tpot_ms / float(forecasts.tpot_factor[chosen]),
            exposed_ms=float(forecasts.exposed_ms[chosen]),
            contended=bool(forecasts.contended[chosen]),
            local=route.prefill is None,
        ),
    )


def build_profile(
    config: RoutingConfig,
    forecaster: RouteForecaster,
    observe: Callable[[str, float], None] | None = None,
    seed: int = 0,
) -> RoutingProfile:
    """Builds the configured profile.

    Args:
        observe: called with the name and the seconds of each scorer.
        seed: seed of all random draws.
    """
    rng = random.Random(seed)
    weights = {name: weight for name, weight in config.scorers.items() if weight > 0}
    return RoutingProfile(
        [FILTERS[name]() for name in config.filters],
        {name: SCORERS[name]() for name in weights},
        weights,
        PICKERS[config.picker](rng),
        forecaster,
        Scan(config.scan_limit, config.sample, rng),
        LocalPrefill(config.local_prefill),
        observe,
    )


_SHOWN = 5
_ROOM = "room"
"""Marks routes that had no room, in place of a scorer's name; the limits that they do not keep follow."""


def routing_record(
    candidates: Candidates,
    chosen: int,
    scores: Mapping[str, Floats],
    weights: Mapping[str, float],
    totals: Floats,
    num_routes: int,
    limits: Mapping[str, Bools],
) -> dict[str, Any]:
    """The best candidates and the chosen one, with scores and predictions; JSON-ready.

    Args:
        scores: values by scorer, each ``[num_candidates]``.
        totals: weighted sums of these.
        num_routes: number of routes, scored or not.
        limits: whether each route keeps it, by name; a route that does not had no room.
    """
    count = len(candidates)
    best: Sequence[int] = range(count)
    if count > _SHOWN:
        best = np.argpartition(-totals, _SHOWN - 1)[:_SHOWN].tolist()
    shown = sorted({chosen, *best}, key=lambda index: (index != chosen, -totals[index]))
    entries = [_candidate(candidates, index, chosen, scores, weights, totals) for index in shown]
    broken = {index: [name for name, keeps in limits.items() if not keeps[index]] for index in shown}
    if not broken[chosen]:
        for index, entry in zip(shown, entries, strict=True):
            if broken[index]:
                entry["lost_on"] = f"{_ROOM}: {', '.join(broken[index])}"
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
        # The scorer that most favoured the chosen route.
        gaps = {name: weights[name] * float(values[chosen] - values[index]) for name, values in scores.items()}
        worst = max(gaps, key=lambda name: gaps[name])
        if gaps[worst] > 0:
            entry["lost_on"] = worst
    return entry
