"""What a pool has counted and timed, and the counts of its members that the autoscaler and metrics need."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection
from statistics import median

from cluster.autoscaling.observation import PoolCounts
from cluster.controller.pool_member import ChangeOrigin, PoolMember
from cluster.registry.workers import WorkerState
from cluster.telemetry.cluster_metrics import PoolFigures

_STARTS_KEPT = 5


class PoolHistory:
    """Counters and durations of a pool.

    Attributes:
        num_started: workers that have become ready.
        failures: ends that were not asked for, by phase: ``starting``, ``serving``, ``hanging``.
        scalings: changes of the size, by direction: ``up``, ``down``.
        role_changes: workers that joined from the other pool, by origin.
        starts_s, role_changes_s: durations of the last ones, in seconds.
    """

    def __init__(self) -> None:
        self.num_started = 0
        self.failures = {"starting": 0, "serving": 0, "hanging": 0}
        self.scalings = {"up": 0, "down": 0}
        self.role_changes = dict.fromkeys(map(str, ChangeOrigin), 0)
        self.starts_s: deque[float] = deque(maxlen=_STARTS_KEPT)
        self.role_changes_s: deque[float] = deque(maxlen=_STARTS_KEPT)

    def counts(self, members: Collection[PoolMember], target: int, *, is_pinned: bool) -> PoolCounts:
        """The counts that the autoscaler needs."""
        states = Counter(member.state for member in members)
        pending = [member for member in members if member.is_pending and not member.leaving.is_set()]
        now_s = time.monotonic()
        return PoolCounts(
            target=target,
            # A suspected worker is soon ready again, or replaced.
            ready=sum(
                member.state in (WorkerState.READY, WorkerState.SUSPECTED) and not member.leaving.is_set()
                for member in members
            ),
            starting=states[WorkerState.STARTING],
            draining=states[WorkerState.DRAINING],
            pending=len(pending),
            pending_s=max((now_s - member.since_s for member in pending), default=0.0),
            reason=next((member.reason for member in pending if member.reason), ""),
            start_s=median(self.starts_s) if self.starts_s else None,
            role_change_s=median(self.role_changes_s) if self.role_changes_s else None,
            pinned=is_pinned,
        )

    def figures(self, members: Collection[PoolMember], target: int) -> PoolFigures:
        """The figures for metrics."""
        states = Counter(str(member.state) for member in members)
        return PoolFigures(
            target=target,
            states={str(state): states[state] for state in WorkerState if state is not WorkerState.DEAD},
            scale_events=dict(self.scalings),
            num_started=self.num_started,
            failures=dict(self.failures),
            role_changes=dict(self.role_changes),
        )
