"""The share of local prompts to plan for: the one with which both pools together need the fewest workers.

The router decides for every prompt with the present workers. The plan decides for workers that may be started.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from baton.core.roles import DECODE, PREFILL
from cluster.autoscaling import tuning
from cluster.autoscaling.costs import PoolCosts
from cluster.autoscaling.decode_capacity import decode_forecast
from cluster.autoscaling.demand import Demand
from cluster.autoscaling.forecast import fewest_workers
from cluster.autoscaling.observation import Observation
from cluster.autoscaling.prefill_capacity import prefill_forecast
from cluster.autoscaling.scaling_limits import PoolLimits, ScalingLimits


@dataclass(frozen=True, slots=True)
class _Pools:
    """Pool sizes for a share of local prompts. ``keeps`` tells whether they meet the targets."""

    share: float
    prefill: int
    decode: int
    keeps: bool


def with_best_share(observation: Observation, limits: ScalingLimits) -> Demand:
    """The demand with the local share for which to size both pools.

    Fewer workers to start take precedence over fewer workers in total, so pools that meet the targets are not changed
    for an equal alternative. If the router has local prefill disabled, the share is 0.
    """
    demand = observation.demand
    prefill, decode = (observation.pools[pool].costs for pool in (PREFILL, DECODE))
    if demand.local_share < tuning.SMALLEST_LOCAL_SHARE:
        return demand.with_local_share(0.0)
    if demand.rate <= 0 or prefill is None or decode is None:
        return demand
    grown = demand.scaled(1.0 + limits.headroom)
    present = {pool: observation.pools[pool].counts for pool in (PREFILL, DECODE)}

    def costs(pools: _Pools) -> tuple[int, bool, float, int, int]:
        """Sort key: (missing workers of pinned pools, targets missed, local share then, workers to start, total)."""
        pinned = started = 0
        for pool, size in ((PREFILL, pools.prefill), (DECODE, pools.decode)):
            missing = max(0, size - present[pool].target)
            pinned += missing * present[pool].pinned
            started += missing
        # If no option meets the targets, the one with the least load on the decode pool is the closest.
        left = 0.0 if pools.keeps else pools.share
        return pinned, not pools.keeps, left, started, pools.prefill + pools.decode

    ways = _ways(grown, prefill, decode, limits.pools[PREFILL], limits.pools[DECODE], present[PREFILL].target)
    return demand.with_local_share(min(ways, key=costs).share)


def _ways(
    demand: Demand, prefill: PoolCosts, decode: PoolCosts, fewer: PoolLimits, more: PoolLimits, present: int
) -> Iterator[_Pools]:
    """Yields options from the fewest prefill workers with the largest share to the most workers with none.

    Args:
        fewer, more: limits of the prefill pool and of the decode pool.
        present: present number of prefill workers.
    """

    size, most, steps = fewer.least_serving, more.max, tuning.LOCAL_SHARE_STEPS
    while True:
        # More prefill workers leave fewer local prompts, which need fewer decode workers.
        steps = bisect_left(range(steps), True, key=partial(_keeps, demand, prefill, size))
        asked = demand.with_local_share(steps / tuning.LOCAL_SHARE_STEPS)
        found = fewest_workers(partial(decode_forecast, asked, decode), more.least_serving, most)
        most = found.workers
        yield _Pools(steps / tuning.LOCAL_SHARE_STEPS, size, most, found.keeps)
        if not steps or size >= fewer.max:
            return
        larger = size + max(1, size // 4)
        size = min(fewer.max, present if size < present < larger else larger)


def _keeps(demand: Demand, costs: PoolCosts, size: int, steps: int) -> bool:
    """Whether ``size`` prefill workers meet the targets of the prompts that are not local."""
    away = demand.with_local_share(steps / tuning.LOCAL_SHARE_STEPS).split()[0]
    return prefill_forecast(away, costs, size, spills=steps > 0).keeps
