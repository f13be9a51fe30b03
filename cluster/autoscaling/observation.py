"""The inputs of the autoscaler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.autoscaling.costs import PoolCosts
from cluster.autoscaling.demand import Demand


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """The owner's counts of a pool's workers.

    Attributes:
        target: target size.
        starting: starting workers, including those without a place.
        pending: requested workers that no node has taken yet.
        pending_s: longest waiting time of a pending worker.
        reason: why it waits.
        start_s: typical duration of a start; ``None`` before the first one.
        role_change_s: typical duration of a drained worker's change to this pool; ``None`` before the first one.
        pinned: True if the size was set by hand.
    """

    target: int
    ready: int = 0
    starting: int = 0
    draining: int = 0
    pending: int = 0
    pending_s: float = 0.0
    reason: str = ""
    start_s: float | None = None
    role_change_s: float | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """The observation of one pool.

    Attributes:
        costs: ``None`` without ready workers.
        load: mean of the last seconds of the prompts that wait or are computed (prefill), or the sequences that decode.
        growth_per_s: growth of ``load``; 0 if it is not significant.
    """

    counts: PoolCounts
    costs: PoolCosts | None = None
    load: float = 0.0
    growth_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """All inputs of a plan.

    Attributes:
        now_s: time on a monotonic clock.
        pools: both pools by name.
        waiting: requests that wait in the router for room on workers.
        role_change_obstacle: why no worker can change its role; empty if workers can.
    """

    now_s: float
    demand: Demand
    pools: Mapping[str, PoolObservation]
    waiting: float = 0.0
    role_change_obstacle: str = ""
