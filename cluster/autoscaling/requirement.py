"""How many workers each pool needs: by what the model predicts, and by the work that has piled up already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt

from baton.core.roles import DECODE, POOLS, PREFILL
from cluster.autoscaling.decode_capacity import decode_forecast
from cluster.autoscaling.demand import Demand
from cluster.autoscaling.forecast import PoolForecast, fewest_workers
from cluster.autoscaling.observation import Observation, PoolObservation
from cluster.autoscaling.prefill_capacity import prefill_forecast
from cluster.autoscaling.scaling_limits import PoolLimits, ScalingLimits

MIN_REQUESTS = 8
ENOUGH_S = 120.0
"""Fewer requests say nothing of a rate, unless they are all that came in so long."""
_CLEAR_S = 15.0
"""What has piled up shall be gone after so long."""
_LONGEST_LOOK_AHEAD_S = 30.0
_CHANCE = 0.14
"""Growth a second that is no more than chance, in square roots of the load: two standard deviations in 14 s."""
_QUEUE_SHARE = 0.5
"""Of the most urgent TTFT target: a queue that takes longer than that is more than the usual ups and downs."""
_FAR = 16
"""Times the largest allowed size: so far it is told what the load would need."""
_CROWDED = 2.0
"""Prompts for each worker, from which on a queue is one even while nothing is known of costs."""

Forecast = Callable[[Demand, int], PoolForecast]


@dataclass(frozen=True, slots=True)
class Requirement:
    """
    Attributes:
        needed: workers for the present load.
        roomy: workers for a load that has grown by the headroom.
        asked: ``needed``; where the largest allowed pool is too small: what would be ``roomy`` without that limit.
        by_queue: the work that has piled up asks for more than the rate does.
        now: what the pool makes of the present load with the size that it shall have.
        fewer: what one worker less would make of a load grown by the headroom; None: there is none less.
        is_known: there is enough to go by. Otherwise ``needed`` and ``roomy`` come from the queue alone.
        is_idle: nothing comes and nothing waits.
    """

    needed: int
    roomy: int
    asked: int
    by_queue: bool
    now: PoolForecast
    fewer: PoolForecast | None
    is_known: bool
    is_idle: bool


def requirement_of(pool: str, observation: Observation, limits: ScalingLimits) -> Requirement:
    """Of one pool, within its limits but for ``asked``."""
    seen, bounds = observation.pools[pool], limits.pools[pool]
    size = max(1, seen.counts.target)
    demand = observation.demand
    is_idle = demand.rate <= 0 and seen.load < 0.5 and not observation.waiting
    if is_idle:
        return Requirement(
            bounds.min, bounds.min, bounds.min, False, PoolForecast(size), PoolForecast(size - 1), True, True
        )
    forecast = _forecast(pool, seen)
    if forecast is None or (demand.num_requests < MIN_REQUESTS and demand.seen_s < ENOUGH_S):
        return _by_queue_alone(pool, seen, bounds, size)
    fewest = fewest_workers(lambda workers: forecast(demand, workers), bounds.min, bounds.max)
    grown = demand.scaled(1.0 + limits.headroom)
    roomy = fewest_workers(lambda workers: forecast(grown, workers), bounds.min, bounds.max).workers
    asked = fewest.workers
    if not fewest.keeps:
        asked = fewest_workers(lambda workers: forecast(grown, workers), bounds.max, _FAR * bounds.max).workers
    now = forecast(demand, size)
    piled = min(_for_queue(pool, observation, limits, now, fewest, forecast), bounds.max)
    fewer = forecast(grown, size - 1) if size > 1 else None
    needed = max(fewest.workers, piled)
    by_queue = piled > fewest.workers
    return Requirement(needed, max(roomy, piled), max(needed, asked), by_queue, now, fewer, True, False)


def _forecast(pool: str, seen: PoolObservation) -> Forecast | None:
    costs = seen.costs
    if costs is None or not costs.is_measured:
        return None
    if pool == DECODE:
        return lambda demand, workers: decode_forecast(demand, costs, workers)
    return lambda demand, workers: prefill_forecast(demand.split()[0], costs, workers, spills=demand.local_share > 0)


def _by_queue_alone(pool: str, seen: PoolObservation, bounds: PoolLimits, size: int) -> Requirement:
    """First samples are no base for a forecast: a queue that grows is worth one worker, and nobody leaves."""
    grows = pool == PREFILL and seen.load > _CROWDED * size and seen.growth_per_s > 0 and not seen.counts.starting
    needed = min(bounds.max, max(bounds.min, size + grows))
    return Requirement(needed, max(needed, size), needed, grows, PoolForecast(size), None, False, False)


def _for_queue(
    pool: str,
    observation: Observation,
    limits: ScalingLimits,
    now: PoolForecast,
    enough: PoolForecast,
    forecast: Forecast,
) -> int:
    """Workers that the work at hand asks for; 1 when there is no more of it than usual.

    Args:
        enough: the smallest pool that keeps the targets at this rate.
    """
    seen, demand = observation.pools[pool], observation.demand
    held = observation.waiting if _is_bottleneck(pool, observation, now) else 0.0
    if demand.rate <= 0:
        return now.workers if held else 1  # those that are at work end by themselves
    if pool == DECODE:
        # How long answers get shows only when they end. That more of them are open shows at once, and by the time that
        # a new worker is there, there are more still.
        ahead_s = limits.interval_s + min(seen.counts.start_s or 0.0, _LONGEST_LOOK_AHEAD_S)
        if seen.counts.starting or seen.load + held <= now.concurrency:
            # More of them come because workers are missing that have been asked for, or the rate has grown and answers
            # have not ended yet: what that leads to is known, and going on like that for so long it would not.
            ahead_s = 0.0
        growth = max(0.0, seen.growth_per_s - _CHANCE * sqrt(seen.load + 1.0))
        return ceil((seen.load + growth * ahead_s + held) / enough.per_worker)
    waiting = seen.load + max(0.0, seen.growth_per_s) * limits.interval_s + held - now.workers
    urgent_s = min((part.slo.ttft_s for part in demand.present), default=0.0)
    if waiting <= 0 or waiting * now.work_s / now.workers < _QUEUE_SHARE * urgent_s:
        return 1
    pressed = demand.scaled(1.0 + waiting / (_CLEAR_S * demand.rate))
    return fewest_workers(lambda workers: forecast(pressed, workers), 1, limits.pools[pool].max).workers


def _is_bottleneck(pool: str, observation: Observation, now: PoolForecast) -> bool:
    """Whether requests wait in the router because of this pool: the busier one of the two."""
    (other,) = (name for name in POOLS if name != pool)
    seen = observation.pools[other]
    forecast = _forecast(other, seen)
    return forecast is None or now.utilisation >= forecast(observation.demand, max(1, seen.counts.target)).utilisation
