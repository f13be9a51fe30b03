"""When a worker goes to the other pool instead of ending there and starting here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.roles import POOLS
from cluster.autoscaling.observation import Observation
from cluster.autoscaling.pool_rules import Reason, Sizing
from cluster.autoscaling.requirement import Requirement
from cluster.autoscaling.scaling_limits import ScalingLimits

_DRAIN_FACTOR = 2.0
"""Requests end one after another; the last one takes longer than the usual one."""

_ROLE_CHANGE_S = 3.0
"""Expected before the first one."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker of the pool ``source`` becomes one of ``destination``.

    Attributes:
        cost_s: drain and change, expected.
        start_s: what a new worker takes; None: there is no place for one, or nobody knows.
    """

    source: str
    destination: str
    cost_s: float
    start_s: float | None


def choose_role_change(
    observation: Observation, limits: ScalingLimits, sizings: Mapping[str, Sizing], needs: Mapping[str, Requirement]
) -> RoleChange | None:
    """One of them, if a pool needs a worker, the other can spare one, and a new one would be later or never there."""
    if not limits.role_change or observation.role_change_obstacle:
        return None
    for destination in POOLS:
        (source,) = (pool for pool in POOLS if pool != destination)
        if _needs_more(destination, observation, limits, sizings) and _can_spare(source, observation, sizings):
            counts = observation.pools[destination].counts
            is_stuck = sizings[destination].reason is Reason.UNPLACED
            cost_s = _DRAIN_FACTOR * needs[source].now.work_s + (counts.role_change_s or _ROLE_CHANGE_S)
            if is_stuck or (counts.start_s is not None and cost_s < counts.start_s):
                return RoleChange(source, destination, cost_s, None if is_stuck else counts.start_s)
    return None


def _needs_more(pool: str, observation: Observation, limits: ScalingLimits, sizings: Mapping[str, Sizing]) -> bool:
    counts, sizing = observation.pools[pool].counts, sizings[pool]
    return not counts.pinned and min(sizing.wanted, limits.pools[pool].max) > counts.target


def _can_spare(pool: str, observation: Observation, sizings: Mapping[str, Sizing]) -> bool:
    """A worker that serves: one that still starts has no weights to keep."""
    counts = observation.pools[pool].counts
    return sizings[pool].has_spare and counts.ready > 1 and not counts.pinned
