"""Waiting for a worker while a pool has none to give, so that a restart is a pause and not an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.core.errors import NoWorkerError
from baton.core.timers import is_over
from cluster.admission.contracts import Dispatcher, Placement
from cluster.admission.refusals import stopping
from cluster.requests.request_record import RequestRecord
from cluster.routing.base import Preference, RouteDecision

_LONGEST_S = 0.5
"""Suspects become usable again with time alone, so nobody waits for a change longer than this."""


class WorkerWait:
    """
    Args:
        dispatcher: knows the best route; None while there is none.
        changed: gives the event that is set at the next change of the workers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[Placement],
        worker_wait_s: float,
        changed: Callable[[], asyncio.Event],
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._worker_wait_s = worker_wait_s
        self._changed = changed
        self._clock = clock
        self._without_since_s: float | None = None
        self._is_closed = False

    def forecast(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
        """The best route at present; None: there is none, and how long that goes on is noted.

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
        """There has been no route for so long that nobody need wait for one any more."""
        since_s = self._without_since_s
        return since_s is not None and is_over(since_s + self._worker_wait_s - self._clock())

    def error(self) -> NoWorkerError:
        """What those who have waited for so long are told."""
        missing = " and no ".join(self._dispatcher.missing_pools()) or "suitable"
        return NoWorkerError(
            f"No {missing} worker took the request within {self._worker_wait_s:g} s. "
            "See `baton status` for the state of the pools."
        )

    def close(self) -> None:
        """Whoever waits is told within half a second."""
        self._is_closed = True

    async def first_route(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision:
        """The first route that there is.

        Args:
            preferred: routes that go before all others.

        Raises:
            NoWorkerError: none came in time.
            OverloadedError: the router stops.
            DeadlineError: the request's own time is over.
        """
        give_up_at = self._clock() + self._worker_wait_s
        while True:
            if self._is_closed:
                raise stopping()
            changed = self._changed()
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
