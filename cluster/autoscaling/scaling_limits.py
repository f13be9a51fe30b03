"""Limits of the autoscaler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The smallest and the largest size of a pool, in workers."""

    min: int = 1
    max: int = 1

    @property
    def least_serving(self) -> int:
        """The smallest size that serves requests."""
        return max(1, self.min)


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Limits of the autoscaler, from the configuration's section ``autoscaler``.

    Attributes:
        interval_s: time between two plans.
        calm_s: how long a pool must have a surplus worker before the first one is removed.
        headroom: growth of the load that a pool must handle after a worker is removed, as a share of the load.
        role_change: True if workers may move to the other pool.
        place_timeout_s: time after which a worker without a place is given up.
    """

    pools: Mapping[str, PoolLimits]
    interval_s: float
    calm_s: float
    headroom: float
    role_change: bool
    place_timeout_s: float
