"""The queue of admission, which knows the next, the last and the expired request. It reads no clock and does no I/O.

    lanes, one per SLO class          interactive  ●●●
    each in order of deadlines        standard     ●●●●●●●●
    next: the most urgent head        batch        ●●●●●●●●●●●●●●

Waiting never changes the order inside a class, since all its requests become more urgent alike. So a lane stays
sorted, and every query looks at one place of each lane, independent of the number of waiting requests.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

from baton.core.queue_priority import QueuePriority
from baton.core.slo import SloClass
from cluster.admission import tuning
from cluster.requests.request_record import RequestRecord


class Alarm:
    """A timer that can be set several times and fires at the earliest of these times.

    Args:
        ring: called when it fires.
        clock: monotonic seconds.
    """

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def set(self, at_s: float) -> None:
        """Sets the timer to ``at_s``, unless it is set to an earlier time."""
        if self._timer is not None:
            if self._due_s <= at_s:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - self._clock()), self._go_off)
        self._due_s = at_s

    def cancel(self) -> None:
        """Stops the timer until it is set again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _go_off(self) -> None:
        self._timer = None
        self._ring()


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A place in the queue.

    Attributes:
        lane: name of the lane: an SLO class, or its late requests. Its tickets share priority and patience.
        expires_s: time at which the request is refused.
        account: name of the SLO class, whose fair share it uses.
        weight: what :attr:`AdmissionQueue.mean_weight` is the mean of.
        is_late: it cannot meet its target; the same for all tickets of a lane.
        is_waiting: it is in the queue.
    """

    item: T
    lane: str
    queue_priority: QueuePriority
    expires_s: float
    account: str
    weight: float = 1.0
    is_late: bool = False
    is_waiting: bool = False

    def yields(self, now_s: float) -> bool:
        """Whether requests that can meet their target may overtake it: it is late, by less than its patience."""
        return self.is_late and now_s < self.queue_priority.deadline_s + self.queue_priority.patience_s

    def late(self, queue_priority: QueuePriority) -> Ticket[T]:
        """The same ticket in the lane of its class's late requests."""
        lane = f"{self.lane}/late"
        return Ticket(self.item, lane, queue_priority, self.expires_s, self.account, self.weight, is_late=True)


class AdmissionQueue(Generic[T]):
    """Waiting requests in lanes, with a fair share for lower classes.

    Args:
        fair_share: share of the dispatches that each waiting class of lower priority gets; in [0, 1].
    """

    def __init__(self, fair_share: float) -> None:
        self._fair_share = fair_share
        self._lanes: dict[str, list[Ticket[T]]] = {}
        self._credits: dict[str, float] = {}
        self._expiries: list[tuple[float, int, Ticket[T]]] = []
        self._numbers = count()
        self._count = 0
        self._weight = 0.0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket[T]]:
        return (ticket for lane in self._lanes.values() for ticket in lane)

    @property
    def mean_weight(self) -> float:
        """The mean weight of all tickets; 0 if there are none."""
        return self._weight / self._count if self._count else 0.0

    def add(self, ticket: Ticket[T]) -> None:
        """Adds a ticket after those of its lane with the same deadline."""
        lane = self._lanes.setdefault(ticket.lane, [])
        lane.insert(bisect_right(lane, ticket.queue_priority.deadline_s, key=_deadline), ticket)
        heappush(self._expiries, (ticket.expires_s, next(self._numbers), ticket))
        ticket.is_waiting = True
        self._count += 1
        self._weight += ticket.weight

    def remove(self, ticket: Ticket[T]) -> bool:
        """Removes a ticket. Returns False if it is not in the queue."""
        if not ticket.is_waiting:
            return False
        lane = self._lanes[ticket.lane]
        index = bisect_left(lane, ticket.queue_priority.deadline_s, key=_deadline)
        while lane[index] is not ticket:
            index += 1
        del lane[index]
        ticket.is_waiting = False
        self._count -= 1
        self._weight -= ticket.weight
        if not lane:
            del self._lanes[ticket.lane]
        if len(self._expiries) > 2 * self._count + tuning.EXPIRED_ENTRIES_KEPT:
            self._expiries = [entry for entry in self._expiries if entry[2].is_waiting]
            heapify(self._expiries)
        return True

    def clear(self) -> list[T]:
        """Removes and returns all items."""
        tickets = list(self)
        for ticket in tickets:
            self.remove(ticket)
        return [ticket.item for ticket in tickets]

    def head(self, now_s: float) -> Ticket[T] | None:
        """The most urgent ticket."""
        heads = (lane[0] for lane in self._lanes.values())
        return min(heads, key=lambda ticket: ticket.queue_priority.key(now_s), default=None)

    def tail(self, now_s: float) -> Ticket[T] | None:
        """The least urgent ticket."""
        tails = (lane[-1] for lane in self._lanes.values())
        return max(tails, key=lambda ticket: ticket.queue_priority.key(now_s), default=None)

    def num_ahead(self, queue_priority: QueuePriority, now_s: float, *, yielding: bool = True) -> int:
        """The number of tickets that go before a request that arrives now.

        Args:
            yielding: also count tickets that yield, which are the last ones of their lane.
        """
        key, total = queue_priority.key(now_s), 0
        for lane in self._lanes.values():
            ahead = bisect_right(lane, key, key=lambda ticket: ticket.queue_priority.key(now_s))
            if not yielding:
                ahead = min(ahead, bisect_left(lane, True, key=lambda ticket: ticket.yields(now_s)))
            total += ahead
        return total

    def next_expiry_s(self) -> float | None:
        """The time of the next expiry; ``None`` if the queue is empty."""
        while self._expiries and not self._expiries[0][2].is_waiting:
            heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def pop_expired(self, now_s: float) -> list[Ticket[T]]:
        """Removes and returns all expired tickets."""
        expired: list[Ticket[T]] = []
        while (next_s := self.next_expiry_s()) is not None and next_s <= now_s:
            expired.append(heappop(self._expiries)[2])
            self.remove(expired[-1])
        return expired

    def note_dispatch(self, queue_priority: QueuePriority, account: str) -> None:
        """Counts a dispatch, queued before or not. Waiting classes of lower priority earn credit."""
        if account in self._credits:
            self._credits[account] = max(0.0, self._credits[account] - 1.0)
        passed = {
            lane[0].account
            for lane in self._lanes.values()
            if lane[0].queue_priority.priority < queue_priority.priority
        }
        for name in passed - {account}:
            self._credits[name] = min(tuning.LARGEST_CREDIT, self._credits.get(name, 0.0) + self._fair_share)

    def owed(self) -> Ticket[T] | None:
        """The first ticket of a class whose fair share is due, or ``None``."""
        due = [name for name, credit in self._credits.items() if credit >= 1.0 - tuning.CREDIT_ROUNDING]
        if not due:
            return None
        heads = [lane[0] for lane in self._lanes.values() if lane[0].account in due]
        return min(
            heads, key=lambda ticket: (-ticket.queue_priority.priority, ticket.queue_priority.deadline_s), default=None
        )


def _deadline(ticket: Ticket[T]) -> float:
    return ticket.queue_priority.deadline_s


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[T]):
    """A request in one call of ``Admission.admit``.

    Attributes:
        queue_priority: its place in the queue. ``record.queue_priority`` is its place on workers.
        queued_s: when the call began; seconds of the router's clock.
        future: receives the placement or the error if the request waits. The result ``None`` means that there is no
            route and that the request must wait for a worker.
        ticket: its place in the queue, if it has or had one.
        was_delayed: it has had its only batching delay.
        is_lost: it waits among requests that cannot meet their TTFT target.
    """

    record: RequestRecord
    queue_priority: QueuePriority
    queued_s: float
    future: asyncio.Future[T | None] | None = None
    ticket: Ticket[Any] | None = None
    was_delayed: bool = False
    is_lost: bool = False

    @property
    def slo(self) -> SloClass:
        return self.record.request.slo

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.record.request.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        """The most tokens that its answer may have."""
        return self.record.request.params.max_tokens

    @property
    def is_cancelled(self) -> bool:
        """True if the client left and the waiting task has not run since."""
        return self.future is not None and self.future.done()

    def step_back(self, now_s: float) -> None:
        """Lowers the priority on workers of a request that cannot meet its target, and restarts its deadline.

        Otherwise it would at once be more urgent than requests that can still meet their target.
        """
        ttft_s = self.slo.ttft_s
        self.record.queue_priority = QueuePriority(self.slo.priority - 1, now_s + ttft_s, ttft_s)

    def result(self) -> asyncio.Future[T | None]:
        """The future that the waiting task awaits."""
        if self.future is None:
            self.future = asyncio.get_running_loop().create_future()
        return self.future

    def grant(self, placement: T) -> None:
        """Ends the wait of a request that is not cancelled."""
        self.result().set_result(placement)

    def wait_for_workers(self) -> None:
        """Ends the wait of a request that is not cancelled, because there is no route."""
        self.result().set_result(None)

    def fail(self, error: Exception) -> None:
        """Ends the wait with an error, unless it has ended."""
        if not self.result().done():
            self.result().set_exception(error)

    def placement(self) -> T | None:
        """The placement that was granted, if one was."""
        future = self.future
        granted = future is not None and future.done() and not future.cancelled() and future.exception() is None
        return future.result() if granted and future is not None else None
