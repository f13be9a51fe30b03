"""How many lines of jobs may run: what urgent requests leave.

The limit halves when an urgent request arrives, and grows by one with each round of finished lines (AIMD, as congestion
control in TCP has it): Chiu and Jain, *Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in
Computer Networks* (1989). While an urgent request waits for its first token, no line starts but a single one, so that a
job goes on beside traffic that never ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.core.slo import SloClass
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import RequestRecord

_PAUSE_S = 0.25
"""The limit halves at most this often, so that a burst counts once."""


class Pace(RequestObserver):
    """Hands out permits, in the order in which they were asked for.

    Args:
        max_in_flight: the limit while no urgent request comes.
        is_urgent: whether requests of a class come before lines of jobs.
        clock: monotonic seconds.
    """

    def __init__(
        self, max_in_flight: int, is_urgent: Callable[[SloClass], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max = float(max_in_flight)
        self._limit = self._max
        self._is_urgent = is_urgent
        self._clock = clock
        self._shrunk_s = -_PAUSE_S
        self._urgent: set[str] = set()
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()
        self._is_one_alone = False
        self.num_in_flight = 0

    @property
    def limit(self) -> int:
        """Lines that may be in flight while no urgent request waits for its first token."""
        return int(self._limit)

    def accepted(self, record: RequestRecord) -> None:
        """Shrinks the limit for an urgent request, which waits for its first token from now on."""
        if self._is_urgent(record.request.slo):
            self._urgent.add(record.request.request_id)
            self.shrink()

    def first_token(self, record: RequestRecord) -> None:
        """An urgent request waits no more."""
        self._urgent.discard(record.request.request_id)
        self._grant()

    def ended(self, record: RequestRecord) -> None:
        """An urgent request waits no more."""
        self._urgent.discard(record.request.request_id)
        self._grant()

    def shrink(self) -> None:
        """Halves the limit, for an urgent request or because the cluster has refused a line."""
        now_s = self._clock()
        if now_s - self._shrunk_s >= _PAUSE_S:
            self._shrunk_s = now_s
            self._limit = max(1.0, self._limit / 2)

    @asynccontextmanager
    async def permit(self, *, alone: bool = False) -> AsyncIterator[None]:
        """Waits for room; a line may run inside the context.

        Args:
            alone: no other line may be in flight.
        """
        await self._take(alone)
        try:
            yield
            self._limit = min(self._max, self._limit + 1 / self._limit)
        finally:
            self._give_back()

    async def _take(self, alone: bool) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, alone))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            else:
                self._grant()
            raise

    def _give_back(self) -> None:
        self.num_in_flight -= 1
        self._is_one_alone = False
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            turn, alone = self._waiting[0]
            if not turn.done():
                if not self._has_room(alone):
                    return
                self.num_in_flight += 1
                self._is_one_alone = alone
                turn.set_result(None)
            self._waiting.popleft()

    def _has_room(self, alone: bool) -> bool:
        if self.num_in_flight == 0:
            return True
        if alone or self._is_one_alone:
            return False
        return not self._urgent and self.num_in_flight < self.limit
