"""The target size of each pool: a pure function of observation, limits and previous state.

    demand, costs ── local share ── requirement ── pool rules ── role change ── plan ── sentences

See ``docs/autoscaling.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from baton.core.roles import POOLS
from cluster.autoscaling.forecast import PoolForecast
from cluster.autoscaling.local_share import with_best_share
from cluster.autoscaling.observation import Observation
from cluster.autoscaling.pool_rules import PoolState, Reason, Sizing, is_waking, size_pool
from cluster.autoscaling.requirement import Requirement, requirement_of
from cluster.autoscaling.role_change import RoleChange, choose_role_change
from cluster.autoscaling.scaling_limits import ScalingLimits
from cluster.autoscaling.wording import explain_pool, explain_role_change


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """State to pass to the next call of :func:`plan`."""

    pools: Mapping[str, PoolState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The plan for one pool.

    Attributes:
        before, target: previous and new target size.
        wanted: size that the load needs, regardless of limits and free nodes.
        predicted: forecast with ``before`` workers.
        texts: the reason in sentences, with the numbers.
    """

    before: int
    target: int
    wanted: int
    reason: Reason
    predicted: PoolForecast
    texts: tuple[str, ...]

    @property
    def direction(self) -> str:
        """``up``, ``down`` or ``hold``."""
        return "up" if self.target > self.before else "down" if self.target < self.before else "hold"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "before": self.before,
            "target": self.target,
            "wanted": self.wanted,
            "direction": self.direction,
            "reason": str(self.reason),
            "utilisation": round(self.predicted.utilisation, 4),
            "attainment": {name: round(share, 4) for name, share in (self.predicted.attainment or {}).items()},
            "texts": list(self.texts),
        }


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """The plan for both pools.

    Attributes:
        pools: both pools by name. The targets include the role change.
        role_change: the role change of a worker, or ``None``.
        state: state for the next plan.
    """

    pools: Mapping[str, PoolPlan]
    role_change: RoleChange | None
    state: AutoscalerState

    @property
    def changes(self) -> bool:
        """Whether a target changes."""
        return any(pool.target != pool.before for pool in self.pools.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the state."""
        return {
            "pools": {name: pool.to_dict() for name, pool in self.pools.items()},
            "move": None if self.role_change is None else asdict(self.role_change),
        }


def plan(observation: Observation, limits: ScalingLimits, state: AutoscalerState) -> ScalingPlan:
    """Plans the next sizes of both pools."""
    observation = replace(observation, demand=with_best_share(observation, limits))
    needs = {name: requirement_of(name, observation, limits) for name in POOLS}
    has_waking = any(is_waking(pool.counts, limits) for pool in observation.pools.values())
    sizings = {
        name: size_pool(
            observation.pools[name].counts,
            needs[name],
            limits.pools[name],
            limits,
            state.pools.get(name, PoolState()),
            observation.now_s,
            has_waking=has_waking,
        )
        for name in POOLS
    }
    role_change = choose_role_change(observation, limits, sizings, needs)
    pools = {name: _pool_plan(name, observation, limits, needs[name], sizings[name], role_change) for name in POOLS}
    return ScalingPlan(pools, role_change, AutoscalerState({name: sizing.state for name, sizing in sizings.items()}))


def _pool_plan(
    name: str,
    observation: Observation,
    limits: ScalingLimits,
    needs: Requirement,
    sizing: Sizing,
    role_change: RoleChange | None,
) -> PoolPlan:
    counts = observation.pools[name].counts
    target, reason = sizing.target, sizing.reason
    texts = explain_pool(name, observation, limits, needs, sizing)
    if role_change is not None and name == role_change.source:
        target, reason = counts.target - 1, Reason.ROLE_CHANGE
    elif role_change is not None:
        # The other pool's worker replaces one that could not be placed.
        target = max(target, counts.target + 1) if reason is not Reason.UNPLACED else target + 1
        reason = Reason.ROLE_CHANGE
    if role_change is not None:
        texts = (*texts, explain_role_change(role_change))
    return PoolPlan(counts.target, target, max(sizing.wanted, needs.asked), reason, needs.now, texts)
