"""Role changes: a worker moves to the other pool instead of one ending and another one starting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.roles import POOLS
from cluster.autoscaling import tuning
from cluster.autoscaling.observation import Observation
from cluster.autoscaling.pool_rules import Reason, Sizing
from cluster.autoscaling.requirement import Requirement
from cluster.autoscaling.scaling_limits import ScalingLimits


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker of the pool ``source`` becomes one of ``destination``.

    Attributes:
        cost_s: expected seconds of drain and change.
        start_s: expected seconds to start a new worker; ``None`` if there is no place for one.
    """

    source: str
    destination: str
    cost_s: float
    start_s: float | None


def choose_role_change(
    observation: Observation, limits: ScalingLimits, sizings: Mapping[str, Sizing], needs: Mapping[str, Requirement]
) -> RoleChange | None:
    """A role change, if a pool needs a worker, the other can spare one, and starting one is slower or impossible."""
    if not limits.role_change or observation.role_change_obstacle:
        return None
    for destination in POOLS:
        (source,) = (pool for pool in POOLS if pool != destination)
        if _needs_more(destination, observation, limits, sizings) and _can_spare(source, observation, sizings):
            counts = observation.pools[destination].counts
            is_stuck = sizings[destination].reason is Reason.UNPLACED
            cost_s = tuning.DRAIN_FACTOR * needs[source].now.work_s + (
                counts.role_change_s or tuning.FIRST_ROLE_CHANGE_S
            )
            if is_stuck or (counts.start_s is not None and cost_s < counts.start_s):
                return RoleChange(source, destination, cost_s, None if is_stuck else counts.start_s)
    return None


def _needs_more(pool: str, observation: Observation, limits: ScalingLimits, sizings: Mapping[str, Sizing]) -> bool:
    counts, sizing = observation.pools[pool].counts, sizings[pool]
    return not counts.pinned and min(sizing.wanted, limits.pools[pool].max) > counts.target


def _can_spare(pool: str, observation: Observation, sizings: Mapping[str, Sizing]) -> bool:
    """Whether the pool can spare a ready worker. A starting worker has no loaded weights to keep."""
    counts = observation.pools[pool].counts
    return sizings[pool].has_spare and counts.ready > 1 and not counts.pinned
