"""A routing profile: filters for each pool, then weighted scorers and a picker for the routes between them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cluster.latency.estimates import RouteForecast
from cluster.routing.base import (
    Candidates,
    Filter,
    Floats,
    Forecaster,
    Ints,
    Picker,
    Preference,
    RouteDecision,
    RoutingRequest,
    Scorer,
    WorkerSnapshot,
)
from cluster.routing.policies import FILTERS, PICKERS, SCORERS
from cluster.routing.record import routing_record
from cluster.routing.routing_config import RoutingConfig
from cluster.routing.scan import LocalPrefill, Scan, count_routes, routes


class RoutingProfile:
    """Implements :class:`cluster.routing.base.RouteChooser`.

    Args:
        scorers: by name.
        weights: of each of the scorers.
        observe: is told how many seconds a scorer took.
        timer: seconds, for that.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        scorers: Mapping[str, Scorer],
        weights: Mapping[str, float],
        picker: Picker,
        forecaster: Forecaster,
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
        """See :class:`RouteChooser`."""
        local = LocalPrefill.ALWAYS if request.is_resumed else self._local_prefill
        prefill = [] if local is LocalPrefill.ALWAYS else self._filter(prefill, request)
        decode = self._filter(decode, request)
        if not decode or (not prefill and local is LocalPrefill.NEVER):
            return None
        num_routes = count_routes(len(prefill), len(decode), local)
        prefill, decode = self._scan.narrow(prefill, decode)
        prefill_index, decode_index = routes(len(prefill), len(decode), local)
        forecasts = self._forecaster.forecast(prefill, decode, prefill_index, decode_index, request)
        candidates = Candidates(request, prefill, decode, prefill_index, decode_index, forecasts)
        scores = self._score(candidates) if self._picker.needs_scores else {}
        totals = np.zeros(len(candidates))
        for name, values in scores.items():
            totals += self._weights[name] * values
        among = _those(preferred, candidates)
        chosen = self._picker.pick(candidates, totals, among)
        record = routing_record(candidates, chosen, scores, self._weights, totals, num_routes, among)
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


def _those(preferred: Preference | None, candidates: Candidates) -> Ints:
    """Indices of the routes that are preferred, or of all if none is."""
    found = np.flatnonzero(preferred(candidates)) if preferred is not None else None
    return np.arange(len(candidates)) if found is None or not len(found) else found


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
        has_seat=route.decode.has_seat(candidates.request.num_tokens),
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
    forecaster: Forecaster,
    observe: Callable[[str, float], None] | None = None,
    seed: int = 0,
) -> RoutingProfile:
    """The profile that the configuration describes.

    Args:
        observe: see :class:`RoutingProfile`.
        seed: of whatever is drawn at random.
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
