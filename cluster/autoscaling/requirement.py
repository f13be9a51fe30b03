"""The number of workers that each pool needs, by the model's prediction and by the queued work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt

from baton.core.roles import DECODE, POOLS, PREFILL
from cluster.autoscaling import tuning
from cluster.autoscaling.decode_capacity import decode_forecast
from cluster.autoscaling.demand import Demand
from cluster.autoscaling.forecast import PoolForecast, fewest_workers
from cluster.autoscaling.observation import Observation, PoolObservation
from cluster.autoscaling.prefill_capacity import prefill_forecast
from cluster.autoscaling.scaling_limits import PoolLimits, ScalingLimits

Forecast = Callable[[Demand, int], PoolForecast]


@dataclass(frozen=True, slots=True)
class Requirement:
    """The number of workers that a pool needs.

    Attributes:
        needed: workers for the present load.
        roomy: workers for a load that has grown by the headroom.
        asked: ``needed``, or if the largest allowed pool is too small, the size for the load with headroom.
        by_queue: True if the queued work needs more workers than the rate does.
        now: forecast of the present load with the pool's target size.
        fewer: forecast of the load with headroom and one worker less; ``None`` if there is only one.
        is_known: True if there is enough data. Otherwise ``needed`` and ``roomy`` come from the queue alone.
        is_idle: True if no requests arrive or wait.
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
    """The requirement of one pool, within its limits except for ``asked``."""
    seen, bounds = observation.pools[pool], limits.pools[pool]
    size = max(1, seen.counts.target)
    demand = observation.demand
    is_idle = demand.rate <= 0 and seen.load < 0.5 and not observation.waiting
    if is_idle:
        return Requirement(
            bounds.min, bounds.min, bounds.min, False, PoolForecast(size), PoolForecast(size - 1), True, True
        )
    forecast = _forecast(pool, seen)
    if forecast is None or (demand.num_requests < tuning.MIN_REQUESTS and demand.seen_s < tuning.ENOUGH_S):
        return _by_queue_alone(pool, seen, bounds, size)
    fewest = fewest_workers(lambda workers: forecast(demand, workers), bounds.least_serving, bounds.max)
    grown = demand.scaled(1.0 + limits.headroom)
    roomy = fewest_workers(lambda workers: forecast(grown, workers), bounds.least_serving, bounds.max).workers
    asked = fewest.workers
    if not fewest.keeps:
        asked = fewest_workers(
            lambda workers: forecast(grown, workers), bounds.max, tuning.SEARCH_FACTOR * bounds.max
        ).workers
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
    """The requirement without a forecast: one more worker if the queue grows, and never fewer."""
    grows = (
        pool == PREFILL
        and seen.load > tuning.CROWDED_PROMPTS * size
        and seen.growth_per_s > 0
        and not seen.counts.starting
    )
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
    """Workers that the queued work needs; 1 if there is no more of it than usual.

    Args:
        enough: forecast of the smallest pool that meets the targets at this rate.
    """
    seen, demand = observation.pools[pool], observation.demand
    held = observation.waiting if _is_bottleneck(pool, observation, now) else 0.0
    if demand.rate <= 0:
        return now.workers if held else 1  # requests in progress end by themselves
    if pool == DECODE:
        # The length of answers shows only at their end, but the number of open answers shows at once. It is
        # extrapolated to the time at which a new worker is ready.
        ahead_s = limits.interval_s + min(seen.counts.start_s or 0.0, tuning.LONGEST_LOOK_AHEAD_S)
        if seen.counts.starting or seen.load + held <= now.concurrency:
            # The growth is expected: requested workers are still starting, or the load has not yet reached the
            # forecast's concurrency. It must not be extrapolated.
            ahead_s = 0.0
        growth = max(0.0, seen.growth_per_s - tuning.CHANCE_GROWTH * sqrt(seen.load + 1.0))
        return ceil((seen.load + growth * ahead_s + held) / enough.per_worker)
    waiting = seen.load + max(0.0, seen.growth_per_s) * limits.interval_s + held - now.workers
    urgent_s = min((part.slo.ttft_s for part in demand.present), default=0.0)
    if waiting <= 0 or waiting * now.work_s / now.workers < tuning.QUEUE_SHARE * urgent_s:
        return 1
    pressed = demand.scaled(1.0 + waiting / (tuning.CLEAR_QUEUE_S * demand.rate))
    return fewest_workers(lambda workers: forecast(pressed, workers), 1, limits.pools[pool].max).workers


def _is_bottleneck(pool: str, observation: Observation, now: PoolForecast) -> bool:
    """Whether requests wait in the router because of this pool, which is the busier one of the two."""
    (other,) = (name for name in POOLS if name != pool)
    seen = observation.pools[other]
    forecast = _forecast(other, seen)
    return forecast is None or now.utilisation >= forecast(observation.demand, max(1, seen.counts.target)).utilisation
