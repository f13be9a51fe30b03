"""What the autoscaler may do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The smallest and the largest size of a pool, in workers."""

    min: int = 1
    max: int = 1


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Their defaults are those of the configuration's section ``autoscaler``.

    Attributes:
        interval_s: between two plans.
        calm_s: how long a pool must have had a worker too many before the first one goes.
        headroom: growth of the load that a pool must bear after a worker was taken away, as a share of it.
        role_change: a worker may go to the other pool.
        place_timeout_s: after which a worker without a place is given up.
    """

    pools: Mapping[str, PoolLimits]
    interval_s: float
    calm_s: float
    headroom: float
    role_change: bool
    place_timeout_s: float
