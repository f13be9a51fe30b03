"""The section ``autoscaler`` of the configuration: whether pools change their sizes by themselves, and how far."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from baton.core.config_section import Duration, PositiveInt, Section
from cluster.autoscaling.scaling_limits import PoolLimits, ScalingLimits


class PoolLimitsConfig(Section):
    """How small and how large a pool may become, in workers."""

    min: PositiveInt = 1
    max: PositiveInt = 8

    @model_validator(mode="after")
    def _in_order(self) -> PoolLimitsConfig:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, which is less than min, {self.min}")
        return self


class AutoscalerConfig(Section):
    """See ``docs/autoscaling.md``. ``baton plan`` tells what it would do even while it is off."""

    enabled: bool = False
    prefill: PoolLimitsConfig = PoolLimitsConfig()
    decode: PoolLimitsConfig = PoolLimitsConfig()
    interval: Duration = 5.0
    """Between two plans."""
    calm: Duration = 30.0
    """How long a pool must have had a worker too many before the first one goes."""
    headroom: Annotated[float, Field(ge=0, le=4)] = 0.06
    """Growth of the load that a pool must bear after a worker was taken away, as a share of it."""
    role_change: bool = True
    """A worker may change to the other pool where that is quicker than a new one, or no node has room for one."""
    place_timeout: Duration = 60.0
    """How long Ray may look for a place before the wish for another worker is given up, for a while."""

    def to_limits(self) -> ScalingLimits:
        pools = {
            "prefill": PoolLimits(self.prefill.min, self.prefill.max),
            "decode": PoolLimits(self.decode.min, self.decode.max),
        }
        return ScalingLimits(pools, self.interval, self.calm, self.headroom, self.role_change, self.place_timeout)
