"""The queue of admission: who is next, who is the last, whose time is over. Pure; no clock of its own.

    lanes, one per SLO class          interactive  ●●●
    each in order of deadlines        standard     ●●●●●●●●
    next: the most urgent head        batch        ●●●●●●●●●●●●●●

Inside a class nobody overtakes by waiting, since all get more urgent alike. So a lane stays sorted, and whatever is
asked looks at one place of each lane: at most 16 of them, however many requests wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from baton.core.urgency import Urgency

T = TypeVar("T")
_MOST_CREDIT = 2.0
_ROUNDING = 1e-9
_GARBAGE = 64


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A place in the queue.

    Attributes:
        lane: of an SLO class, or of those of it that are late. All of one lane have the same priority and patience.
        expires_s: when it is better refused.
        account: of the fair share: name of the SLO class.
        is_late: its target cannot be kept any more. Those of a lane are alike in this, too.
        is_waiting: it is in the queue.
    """

    item: T
    lane: str
    urgency: Urgency
    expires_s: float
    account: str
    is_late: bool = False
    is_waiting: bool = False

    def yields(self, now_s: float) -> bool:
        """Whether those who can be in time may go before it: it is late, and not yet by its patience."""
        return self.is_late and now_s < self.urgency.deadline_s + self.urgency.patience_s

    def late(self, urgency: Urgency) -> Ticket[T]:
        """The same among those of its class that are late."""
        return Ticket(self.item, f"{self.lane}/late", urgency, self.expires_s, self.account, is_late=True)


class WaitingLine(Generic[T]):
    """
    Args:
        fair_share: of what is dispatched, that each class of lower priority gets while it waits; in [0, 1].
    """

    def __init__(self, fair_share: float) -> None:
        self._fair_share = fair_share
        self._lanes: dict[str, list[Ticket[T]]] = {}
        self._credits: dict[str, float] = {}
        self._expiries: list[tuple[float, int, Ticket[T]]] = []
        self._numbers = count()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket[T]]:
        return (ticket for lane in self._lanes.values() for ticket in lane)

    def add(self, ticket: Ticket[T]) -> None:
        """Behind those of its lane that have the same deadline."""
        lane = self._lanes.setdefault(ticket.lane, [])
        lane.insert(bisect_right(lane, ticket.urgency.deadline_s, key=_deadline), ticket)
        heappush(self._expiries, (ticket.expires_s, next(self._numbers), ticket))
        ticket.is_waiting = True
        self._count += 1

    def remove(self, ticket: Ticket[T]) -> bool:
        """False: it is not here any more."""
        if not ticket.is_waiting:
            return False
        lane = self._lanes[ticket.lane]
        index = bisect_left(lane, ticket.urgency.deadline_s, key=_deadline)
        while lane[index] is not ticket:
            index += 1
        del lane[index]
        ticket.is_waiting = False
        self._count -= 1
        if not lane:
            del self._lanes[ticket.lane]
        if len(self._expiries) > 2 * self._count + _GARBAGE:
            self._expiries = [entry for entry in self._expiries if entry[2].is_waiting]
            heapify(self._expiries)
        return True

    def clear(self) -> list[T]:
        """Takes out all."""
        tickets = list(self)
        for ticket in tickets:
            self.remove(ticket)
        return [ticket.item for ticket in tickets]

    def head(self, now_s: float) -> Ticket[T] | None:
        """The most urgent one."""
        heads = (lane[0] for lane in self._lanes.values())
        return min(heads, key=lambda ticket: ticket.urgency.key(now_s), default=None)

    def tail(self, now_s: float) -> Ticket[T] | None:
        """The least urgent one."""
        tails = (lane[-1] for lane in self._lanes.values())
        return max(tails, key=lambda ticket: ticket.urgency.key(now_s), default=None)

    def num_ahead(self, urgency: Urgency, now_s: float, *, yielding: bool = True) -> int:
        """How many would go before a request that came now.

        Args:
            yielding: those that yield, too. They stand behind the others of their lane.
        """
        key, total = urgency.key(now_s), 0
        for lane in self._lanes.values():
            ahead = bisect_right(lane, key, key=lambda ticket: ticket.urgency.key(now_s))
            if not yielding:
                ahead = min(ahead, bisect_left(lane, True, key=lambda ticket: ticket.yields(now_s)))
            total += ahead
        return total

    def next_expiry_s(self) -> float | None:
        """None when nobody waits."""
        while self._expiries and not self._expiries[0][2].is_waiting:
            heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def pop_expired(self, now_s: float) -> list[Ticket[T]]:
        """Takes out all whose time is over."""
        expired: list[Ticket[T]] = []
        while (next_s := self.next_expiry_s()) is not None and next_s <= now_s:
            expired.append(heappop(self._expiries)[2])
            self.remove(expired[-1])
        return expired

    def note_dispatch(self, urgency: Urgency, account: str) -> None:
        """A request went, from the queue or past it: classes of lower priority that wait get nearer to their share."""
        if account in self._credits:
            self._credits[account] = max(0.0, self._credits[account] - 1.0)
        passed = {lane[0].account for lane in self._lanes.values() if lane[0].urgency.priority < urgency.priority}
        for name in passed - {account}:
            self._credits[name] = min(_MOST_CREDIT, self._credits.get(name, 0.0) + self._fair_share)

    def owed(self) -> Ticket[T] | None:
        """The first of a class whose share is due, whatever else waits."""
        due = [name for name, credit in self._credits.items() if credit >= 1.0 - _ROUNDING]
        if not due:
            return None
        heads = [lane[0] for lane in self._lanes.values() if lane[0].account in due]
        return min(heads, key=lambda ticket: (-ticket.urgency.priority, ticket.urgency.deadline_s), default=None)


def _deadline(ticket: Ticket[T]) -> float:
    return ticket.urgency.deadline_s
