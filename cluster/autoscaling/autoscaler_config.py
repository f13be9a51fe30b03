"""The section ``autoscaler`` of the configuration: automatic pool sizes and their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from baton.core.config_section import Duration, PositiveInt, Section
from cluster.autoscaling.scaling_limits import PoolLimits, ScalingLimits

_LOCAL_PLACE_S = 60.0
_NODE_S = 1200.0


class PoolLimitsConfig(Section):
    """The smallest and the largest size of a pool, in workers."""

    min: Annotated[int, Field(ge=0)] = 1
    """0: a pool without requests ends its last worker, and starts one when a request comes."""
    max: PositiveInt = 8
    """The largest number of workers that the autoscaler starts."""

    @model_validator(mode="after")
    def _in_order(self) -> PoolLimitsConfig:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, which is less than min, {self.min}")
        return self


def how_to_sleep(pool: str) -> str:
    """What to do for those who want a pool without workers; a size of 0 set by hand would never grow again."""
    return (
        f"For a pool that ends its last worker while there are no requests, and starts one for the next, set "
        f"autoscaler.enabled to true and autoscaler.{pool}.min to 0."
    )


class AutoscalerConfig(Section):
    """The autoscaler; see ``docs/autoscaling.md``. ``baton plan`` shows its next step even while it is off."""

    enabled: bool = False
    """Changes the sizes of the pools by itself."""
    prefill: PoolLimitsConfig = PoolLimitsConfig()
    decode: PoolLimitsConfig = PoolLimitsConfig()
    interval: Duration = 5.0
    """Time between two plans."""
    calm: Duration = 30.0
    """How long a pool must have a surplus worker before the first one is removed."""
    headroom: Annotated[float, Field(ge=0, le=4)] = 0.06
    """Growth of the load that a pool must handle after a worker is removed, as a share of the load."""
    role_change: bool = True
    """Lets a worker change to the other pool if that is faster than starting one, or no node has room for one."""
    place_timeout: Duration | None = None
    """How long Ray may look for a place for a new worker before the autoscaler backs off. null: 1 min on a local Ray,
    which gets no more nodes, and 20 min otherwise, in which a cloud brings a GPU node."""

    @property
    def waking_pools(self) -> frozenset[str]:
        """Pools that may have no worker while there are no requests, and start one when a request comes."""
        pools = {"prefill": self.prefill, "decode": self.decode}
        return frozenset(name for name, bounds in pools.items() if self.enabled and bounds.min == 0)

    def to_limits(self, *, is_local: bool) -> ScalingLimits:
        """The limits for the autoscaler.

        Args:
            is_local: Ray runs on this machine alone.
        """
        pools = {
            "prefill": PoolLimits(self.prefill.min, self.prefill.max),
            "decode": PoolLimits(self.decode.min, self.decode.max),
        }
        place_timeout_s = self.place_timeout or (_LOCAL_PLACE_S if is_local else _NODE_S)
        return ScalingLimits(pools, self.interval, self.calm, self.headroom, self.role_change, place_timeout_s)
