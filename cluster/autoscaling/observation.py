"""What the autoscaler sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.autoscaling.costs import PoolCosts
from cluster.autoscaling.demand import Demand


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A pool's workers, as their owner knows them.

    Attributes:
        target: how many there shall be.
        starting: those without a place included.
        pending: asked for, and no node has taken them yet.
        pending_s: how long the one that waits longest has done so.
        reason: why it waits.
        start_s: what a start usually takes; None: none was seen.
        role_change_s: what a drained worker of the other pool takes to change to this one; None: none did.
        pinned: somebody has set the size by hand.
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
    """
    Attributes:
        costs: None while no worker was ever ready.
        load: prefill: prompts that wait or are computed; decode: sequences that decode. Mean of the last seconds.
        growth_per_s: of ``load``; 0 when it is no more than chance.
    """

    counts: PoolCounts
    costs: PoolCosts | None = None
    load: float = 0.0
    growth_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """
    Attributes:
        now_s: on any clock that never goes back.
        pools: both, by name.
        waiting: requests that wait in the router for room on workers.
        role_change_obstacle: why no worker can change its role; empty: it can.
    """

    now_s: float
    demand: Demand
    pools: Mapping[str, PoolObservation]
    waiting: float = 0.0
    role_change_obstacle: str = ""
