"""Which prompts decode workers shall compute themselves: as many as let both pools together have the fewest workers.

The router weighs that anew for every prompt, by the workers that there are; here it is for workers that there might be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from baton.core.roles import DECODE, PREFILL
from cluster.autoscaling.costs import PoolCosts
from cluster.autoscaling.decode_capacity import decode_forecast
from cluster.autoscaling.demand import Demand
from cluster.autoscaling.forecast import fewest_workers
from cluster.autoscaling.observation import Observation
from cluster.autoscaling.prefill_capacity import prefill_forecast
from cluster.autoscaling.scaling_limits import PoolLimits, ScalingLimits

_SEEN = 0.02
"""A router that keeps less of the prompts local than that has been told not to: what it recovers is computed so."""
_STEPS = 64
"""Shares are multiples of one in so many."""


@dataclass(frozen=True, slots=True)
class _Pools:
    """What keeps the targets with a share of the prompts computed by decode workers; ``keeps``: it really does."""

    share: float
    prefill: int
    decode: int
    keeps: bool


def with_best_share(observation: Observation, limits: ScalingLimits) -> Demand:
    """The demand with the share of prompts to size both pools for.

    What must be started comes first, then what is needed at all: pools that keep the targets one way are not changed
    for another way with as many workers. A router that never computes prompts on decode workers is not expected to.
    """
    demand = observation.demand
    prefill, decode = (observation.pools[pool].costs for pool in (PREFILL, DECODE))
    if demand.local_share < _SEEN:
        return demand.with_local_share(0.0)
    if demand.rate <= 0 or prefill is None or decode is None:
        return demand
    grown = demand.scaled(1.0 + limits.headroom)
    present = {pool: observation.pools[pool].counts for pool in (PREFILL, DECODE)}

    def costs(pools: _Pools) -> tuple[int, bool, float, int, int]:
        """(workers that cannot be had, whether that is too few, prompts left to those, workers to be started, all)."""
        pinned = started = 0
        for pool, size in ((PREFILL, pools.prefill), (DECODE, pools.decode)):
            missing = max(0, size - present[pool].target)
            pinned += missing * present[pool].pinned
            started += missing
        # Where no way keeps the targets, the one that asks the least of the decode pool misses them by least.
        left = 0.0 if pools.keeps else pools.share
        return pinned, not pools.keeps, left, started, pools.prefill + pools.decode

    ways = _ways(grown, prefill, decode, limits.pools[PREFILL], limits.pools[DECODE], present[PREFILL].target)
    return demand.with_local_share(min(ways, key=costs).share)


def _ways(
    demand: Demand, prefill: PoolCosts, decode: PoolCosts, fewer: PoolLimits, more: PoolLimits, present: int
) -> Iterator[_Pools]:
    """From the fewest prefill workers with the largest share to the most with none.

    Args:
        fewer, more: limits of the prefill pool and of the decode pool.
        present: prefill workers that there are.
    """

    size, most, steps = fewer.min, more.max, _STEPS
    while True:
        # The more prefill workers there are, the fewer prompts are left, and the fewer decode workers those need.
        steps = bisect_left(range(steps), True, key=partial(_keeps, demand, prefill, size))
        asked = demand.with_local_share(steps / _STEPS)
        found = fewest_workers(partial(decode_forecast, asked, decode), more.min, most)
        most = found.workers
        yield _Pools(steps / _STEPS, size, most, found.keeps)
        if not steps or size >= fewer.max:
            return
        larger = size + max(1, size // 4)
        size = min(fewer.max, present if size < present < larger else larger)


def _keeps(demand: Demand, costs: PoolCosts, size: int, steps: int) -> bool:
    """Whether so many prefill workers keep the targets of what decode workers leave them."""
    away = demand.with_local_share(steps / _STEPS).split()[0]
    return prefill_forecast(away, costs, size, spills=steps > 0).keeps
