"""Rules for the size of a pool: it grows at once, shrinks slowly, and backs off if no node has room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.autoscaling import tuning
from cluster.autoscaling.observation import PoolCounts
from cluster.autoscaling.requirement import Requirement
from cluster.autoscaling.scaling_limits import PoolLimits, ScalingLimits


class Reason(StrEnum):
    """The reason for a pool's new size."""

    LOAD = "load"
    """There are more requests than the pool can serve in time."""
    QUEUE = "queue"
    """Work has piled up."""
    CALM = "calm"
    """One worker less has been enough, with headroom, for a while."""
    IDLE = "idle"
    """There are no requests."""
    WAKE = "wake"
    """Requests have come to a pool without workers."""
    LIMITS = "limits"
    """The size, or the size that the load needs, is outside of the limits."""
    UNPLACED = "unplaced"
    """No node has room for another worker."""
    ROLE_CHANGE = "move"
    """A worker changes its role."""
    PINNED = "pinned"
    """The size was set by hand."""
    COLD = "cold"
    """There is too little data."""
    ENOUGH = "enough"
    """The size is right."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """State of a pool from one plan to the next.

    Attributes:
        calm_since_s: since when it has had a surplus worker; ``None`` if it has none.
        shrunk_s: time at which the last worker was removed.
        stuck_at: the size beyond which no worker found a place; 0 if none failed to.
        backoff_s: pause before the next attempt.
        retry_s: time from which one more worker may be requested.
    """

    calm_since_s: float | None = None
    shrunk_s: float = float("-inf")
    stuck_at: int = 0
    backoff_s: float = 0.0
    retry_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Sizing:
    """The result of :func:`size_pool`.

    Attributes:
        wanted: size that the load needs, regardless of free nodes.
        has_spare: True if the pool has had a surplus worker for long enough.
    """

    target: int
    wanted: int
    reason: Reason
    state: PoolState
    has_spare: bool = False


def is_waking(counts: PoolCounts, limits: ScalingLimits) -> bool:
    """Whether the first worker of a pool is being started, and may still find a place."""
    return counts.target == 1 and counts.starting > 0 and counts.pending_s < limits.place_timeout_s


def size_pool(
    counts: PoolCounts,
    needs: Requirement,
    bounds: PoolLimits,
    limits: ScalingLimits,
    state: PoolState,
    now_s: float,
    *,
    has_waking: bool,
) -> Sizing:
    """Chooses the next size of a pool, with its reason.

    Args:
        has_waking: whether this pool or the other one is waking, so that the last worker of either stays.
    """
    is_kept = has_waking and counts.target == 1
    state = _watch_calm(counts, needs, bounds, state, now_s, is_kept=is_kept)
    state = _watch_places(counts, state)
    if counts.pinned:
        return Sizing(counts.target, counts.target, Reason.PINNED, state)
    if counts.pending and counts.pending_s >= limits.place_timeout_s:
        placed = max(bounds.least_serving, counts.ready + counts.starting - counts.pending)
        if placed < counts.target:
            return Sizing(placed, max(needs.roomy, placed), Reason.UNPLACED, _give_up(placed, state, now_s))
    if not bounds.min <= counts.target <= bounds.max:
        within = min(max(counts.target, bounds.min), bounds.max)
        return Sizing(within, within, Reason.LIMITS, state)
    if counts.target == 0:
        is_wanted = not needs.is_idle
        return Sizing(int(is_wanted), int(is_wanted), Reason.WAKE if is_wanted else Reason.IDLE, state)
    if needs.needed > counts.target:
        return _grow(counts, needs, state, now_s)
    has_spare = state.calm_since_s is not None and now_s - state.calm_since_s >= limits.calm_s
    # A large pool shrinks faster, but by at most its whole size in one calm period.
    pause_s = max(limits.interval_s * 0.5, limits.calm_s / counts.target)
    if has_spare and now_s - state.shrunk_s >= pause_s:
        smaller = counts.target - 1
        reason = Reason.IDLE if needs.is_idle else Reason.CALM
        return Sizing(smaller, smaller, reason, replace(state, shrunk_s=now_s), True)
    reason = Reason.ENOUGH if needs.is_known else Reason.COLD
    if needs.is_known and not needs.now.keeps and counts.target == bounds.max:
        reason = Reason.LIMITS
    return Sizing(counts.target, counts.target, reason, state, has_spare)


def _watch_calm(
    counts: PoolCounts,
    needs: Requirement,
    bounds: PoolLimits,
    state: PoolState,
    now_s: float,
    *,
    is_kept: bool,
) -> PoolState:
    # A start may take longer than the requests that asked for it are remembered, and they need both pools.
    spare = needs.is_known and counts.target > bounds.min and needs.roomy < counts.target and not is_kept
    if not spare:
        return replace(state, calm_since_s=None)
    return state if state.calm_since_s is not None else replace(state, calm_since_s=now_s)


def _watch_places(counts: PoolCounts, state: PoolState) -> PoolState:
    """Resets the back-off once another worker has found a place."""
    if state.stuck_at and counts.ready > state.stuck_at:
        return replace(state, stuck_at=0, backoff_s=0.0, retry_s=float("-inf"))
    return state


def _give_up(placed: int, state: PoolState, now_s: float) -> PoolState:
    backoff_s = min(tuning.LONGEST_BACKOFF_S, 2 * state.backoff_s or tuning.FIRST_BACKOFF_S)
    return replace(state, stuck_at=placed, backoff_s=backoff_s, retry_s=now_s + backoff_s)


def _grow(counts: PoolCounts, needs: Requirement, state: PoolState, now_s: float) -> Sizing:
    reason = Reason.QUEUE if needs.by_queue else Reason.LOAD
    if not state.stuck_at or needs.roomy <= state.stuck_at:
        return Sizing(needs.roomy, needs.roomy, reason, state)
    if counts.target < state.stuck_at:
        return Sizing(state.stuck_at, needs.roomy, reason, state)
    if now_s < state.retry_s or counts.pending:
        return Sizing(counts.target, needs.roomy, Reason.UNPLACED, state)
    return Sizing(counts.target + 1, needs.roomy, reason, state)
