"""In which order requests that wait are served, and who gives way when there is no room. Shared by all roles."""

from __future__ import annotations

from typing import Protocol

from baton.core.request import Request, RequestStatus


class OrderingPolicy(Protocol):
    """A preempted request has lost work already; a policy should put it before others of its rank."""

    def key(self, request: Request, now_s: float) -> tuple[float, ...]:
        """Smaller is served first.

        Args:
            now_s: the scheduler's clock. Keys that change with it are read again a few times a second.
        """
        ...


class ArrivalOrder:
    """First come, first served."""

    def key(self, request: Request, now_s: float) -> tuple[float, ...]:
        return (request.status is not RequestStatus.PREEMPTED, request.arrival_s)


class EarliestDeadlineFirst:
    """The higher priority first, inside a priority the earlier deadline; late requests gain priority with time.

    Requests without a queue priority are served in the order of their arrival.
    """

    def key(self, request: Request, now_s: float) -> tuple[float, ...]:
        rank, deadline_s = request.queue_priority.key(now_s)
        return (rank, request.status is not RequestStatus.PREEMPTED, deadline_s, request.arrival_s)
