"""Waiting for a worker while a pool has none, so that a restart causes a pause and no error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from baton.core.errors import NoWorkerError
from baton.core.timers import has_expired
from cluster.admission import tuning
from cluster.admission.refusals import stopping
from cluster.requests.request_record import RequestRecord
from cluster.routing.routing_contracts import Preference, RouteDecision


class Placement(Protocol):
    """A request's booking on the workers of its route."""

    def release(self) -> None:
        """Ends the booking. Idempotent."""
        ...


PlacementT_co = TypeVar("PlacementT_co", bound=Placement, covariant=True)


class Dispatcher(Protocol[PlacementT_co]):
    """Chooses and books routes. All methods are synchronous, so a forecast stays valid until it is booked."""

    def forecast(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
        """The best route at present, without booking it; ``None`` if no worker can take the request.

        Args:
            preferred: marks routes that take precedence over all others.
        """
        ...

    def book(self, record: RequestRecord, decision: RouteDecision) -> PlacementT_co:
        """Books the request on its route until the placement is released."""
        ...

    def missing_pools(self) -> Sequence[str]:
        """Pools without a worker that takes requests."""
        ...

    def workers_changed(self) -> asyncio.Event:
        """An event that is set at the next change of the workers."""
        ...


class WorkerWait:
    """Waits for the first worker of a pool.

    Args:
        dispatcher: chooses the route.
        worker_wait_s: how long requests wait without a route.
        clock: monotonic seconds.
        waking_pools: pools that may have no worker while there are no requests, and start one when a request comes.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[Placement],
        worker_wait_s: float,
        clock: Callable[[], float],
        waking_pools: Collection[str] = (),
    ) -> None:
        self._waking_pools = waking_pools
        self._dispatcher = dispatcher
        self._worker_wait_s = worker_wait_s
        self._clock = clock
        self._without_since_s: float | None = None
        self._is_closed = False

    def forecast(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
        """The best route at present, or ``None``. Records since when there has been no route.

        Args:
            preferred: marks routes that take precedence over all others.
        """
        decision = self._dispatcher.forecast(record, preferred)
        if decision is not None:
            self._without_since_s = None
        elif self._without_since_s is None:
            self._without_since_s = self._clock()
        return decision

    @property
    def is_ready(self) -> bool:
        """Whether each pool has a worker that takes requests, or starts one when a request comes."""
        return all(pool in self._waking_pools for pool in self._dispatcher.missing_pools())

    @property
    def is_used_up(self) -> bool:
        """True if there has been no route for ``worker_wait_s``."""
        since_s = self._without_since_s
        return since_s is not None and has_expired(since_s + self._worker_wait_s - self._clock())

    def error(self) -> NoWorkerError:
        """The error of requests that have waited too long."""
        pools = self._dispatcher.missing_pools()
        if pools and self.is_ready:
            return NoWorkerError(
                f"The {' and the '.join(pools)} pool had no requests and thus no workers; one is being started, which "
                f"has taken more than {self._worker_wait_s:g} s (router.worker_wait_s). Try again."
            )
        missing = " and no ".join(pools) or "suitable"
        return NoWorkerError(
            f"No {missing} worker accepted the request within {self._worker_wait_s:g} s. "
            "See `baton status` for the state of the pools."
        )

    def close(self) -> None:
        """Refuses all waiting requests within half a second, and all later ones."""
        self._is_closed = True

    async def first_route(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision:
        """Waits until there is a route, and returns the best one.

        Args:
            preferred: marks routes that take precedence over all others.

        Raises:
            NoWorkerError: there was no route within ``worker_wait_s``.
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
            if has_expired(left):
                raise self.error()
            wait_s = min(left, record.time_left_s, tuning.WORKER_WAIT_TICK_S)
            try:
                async with asyncio.timeout(wait_s):
                    await changed.wait()
            except TimeoutError:
                continue
