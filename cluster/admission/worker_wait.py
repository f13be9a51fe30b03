"""Waiting for a worker while a pool has none to give, so that a restart is a pause and not an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from baton.core.errors import NoWorkerError
from baton.core.timers import is_over
from cluster.admission.refusals import stopping
from cluster.requests.request_record import RequestRecord
from cluster.routing.routing_contracts import Preference, RouteDecision


class Placement(Protocol):
    """A request's place on its route."""

    def release(self) -> None:
        """Gives it back; a second call changes nothing."""
        ...


PlacementT_co = TypeVar("PlacementT_co", bound=Placement, covariant=True)


class Dispatcher(Protocol[PlacementT_co]):
    """Chooses routes. All methods are synchronous, so that nothing can happen in between."""

    def forecast(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
        """The best route at present, without booking it; ``None`` if no worker may take the request.

        Args:
            preferred: routes that go before all others.
        """
        ...

    def book(self, record: RequestRecord, decision: RouteDecision) -> PlacementT_co:
        """From now on the request counts as work of its route, until its place is released."""
        ...

    def missing_pools(self) -> Sequence[str]:
        """Pools without a worker that takes requests."""
        ...

    def workers_changed(self) -> asyncio.Event:
        """An event that is set at the next change of the workers."""
        ...


_LONGEST_S = 0.5
"""Suspects become usable again with time alone, so no wait for a change is longer than this."""


class WorkerWait:
    """
    Args:
        dispatcher: knows the best route, if there is one.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[Placement],
        worker_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._worker_wait_s = worker_wait_s
        self._clock = clock
        self._without_since_s: float | None = None
        self._is_closed = False

    def forecast(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
        """The best route at present, or ``None``. Notes since when there has been no route.

        Args:
            preferred: routes that go before all others.
        """
        decision = self._dispatcher.forecast(record, preferred)
        if decision is not None:
            self._without_since_s = None
        elif self._without_since_s is None:
            self._without_since_s = self._clock()
        return decision

    @property
    def is_used_up(self) -> bool:
        """There has been no route for ``worker_wait_s``, so that no request needs to wait any longer."""
        since_s = self._without_since_s
        return since_s is not None and is_over(since_s + self._worker_wait_s - self._clock())

    def error(self) -> NoWorkerError:
        """The error of requests that have waited too long."""
        missing = " and no ".join(self._dispatcher.missing_pools()) or "suitable"
        return NoWorkerError(
            f"No {missing} worker took the request within {self._worker_wait_s:g} s. "
            "See `baton status` for the state of the pools."
        )

    def close(self) -> None:
        """Waiting requests fail within half a second."""
        self._is_closed = True

    async def first_route(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision:
        """Waits until there is a route.

        Args:
            preferred: routes that go before all others.

        Raises:
            NoWorkerError: none came in time.
            OverloadedError: the router is stopping.
            DeadlineError: the request's own deadline has passed.
        """
        give_up_at = self._clock() + self._worker_wait_s
        while True:
            if self._is_closed:
                raise stopping()
            changed = self._dispatcher.workers_changed()
            decision = self.forecast(record, preferred)
            if decision is not None:
                return decision
            left = give_up_at - self._clock()
            if is_over(left):
                raise self.error()
            wait_s = min(left, record.time_left_s, _LONGEST_S)
            try:
                await asyncio.wait_for(changed.wait(), wait_s)
            except TimeoutError:
                continue
