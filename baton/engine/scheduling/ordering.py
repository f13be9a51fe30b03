"""Policies for the order of waiting requests and for the choice of victims of preemption. Shared by all roles."""

from __future__ import annotations

from typing import Protocol

from baton.core.request import Request, RequestStatus


class OrderingPolicy(Protocol):
    """Ranks requests. A policy should put preempted requests first within their rank, since they have lost work."""

    def key(self, request: Request, now_s: float) -> tuple[float, ...]:
        """Returns the sort key; the smallest is served first.

        Args:
            now_s: the scheduler's clock. Keys that depend on it are recomputed a few times a second.
        """
        ...


class ArrivalOrder:
    """First come, first served."""

    def key(self, request: Request, now_s: float) -> tuple[float, ...]:
        return (request.status is not RequestStatus.PREEMPTED, request.arrival_s)


class EarliestDeadlineFirst:
    """Orders by priority, then by deadline; late requests gain priority with time.

    Requests without a queue priority are served in the order of their arrival.
    """

    def key(self, request: Request, now_s: float) -> tuple[float, ...]:
        rank, deadline_s = request.queue_priority.key(now_s)
        return (rank, request.status is not RequestStatus.PREEMPTED, deadline_s, request.arrival_s)
