"""The queue of admission alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.queue_priority import QueuePriority
from cluster.admission.admission_queue import AdmissionQueue, Ticket

PRIORITIES = {"high": 2, "middle": 1, "low": 0}


def ticket(lane: str, deadline_s: float, *, expires_s: float = 1e6, patience_s: float = 1e9) -> Ticket[str]:
    return Ticket(
        f"{lane}@{deadline_s}", lane, QueuePriority(PRIORITIES[lane], deadline_s, patience_s), expires_s, lane
    )


@given(st.lists(st.tuples(st.sampled_from(sorted(PRIORITIES)), st.integers(0, 20)), max_size=60), st.floats(0, 100))
def test_the_order_matches_a_full_sort(places: list[tuple[str, int]], now_s: float) -> None:
    line: AdmissionQueue[str] = AdmissionQueue(0.05)
    tickets = [ticket(lane, float(deadline), patience_s=15.0) for lane, deadline in places]
    for one in tickets:
        line.add(one)
    keys = sorted(one.queue_priority.key(now_s) for one in tickets)
    head, tail = line.head(now_s), line.tail(now_s)
    assert (head.queue_priority.key(now_s) if head else None) == (keys[0] if keys else None)
    assert (tail.queue_priority.key(now_s) if tail else None) == (keys[-1] if keys else None)
    newcomer = QueuePriority(1, 10.0, 15.0)
    assert line.num_ahead(newcomer, now_s) == sum(key <= newcomer.key(now_s) for key in keys)
    random.Random(0).shuffle(tickets)
    for count, one in enumerate(tickets, 1):
        assert line.remove(one)
        assert not line.remove(one)
        assert len(line) == len(tickets) - count
    assert list(line) == []
    assert line.next_expiry_s() is None


def test_requests_of_one_lane_with_equal_deadlines_keep_their_order() -> None:
    line: AdmissionQueue[str] = AdmissionQueue(0.0)
    first, second = ticket("low", 1.0), ticket("low", 1.0)
    line.add(first)
    line.add(second)
    assert line.head(0.0) is first
    line.remove(first)
    assert line.head(0.0) is second


def test_expired_requests_are_found_at_any_position() -> None:
    line: AdmissionQueue[str] = AdmissionQueue(0.0)
    line.add(ticket("low", 1.0, expires_s=9.0))
    line.add(late := ticket("low", 2.0, expires_s=5.0))
    assert line.next_expiry_s() == 5.0
    assert line.pop_expired(4.9) == []
    assert line.pop_expired(5.0) == [late]
    assert line.next_expiry_s() == 9.0


def test_cancelled_requests_do_not_accumulate_in_memory() -> None:
    line: AdmissionQueue[str] = AdmissionQueue(0.0)
    for _ in range(10_000):
        one = ticket("low", 1.0)
        line.add(one)
        line.remove(one)
    assert len(line._expiries) < 100


def test_a_share_is_due_after_enough_requests_of_higher_priority() -> None:
    line: AdmissionQueue[str] = AdmissionQueue(0.1)
    line.add(waiting := ticket("low", 1.0))
    line.add(ticket("low", 2.0))
    due = []
    for number in range(1, 31):
        line.note_dispatch(QueuePriority(2, 0.0), "high")
        if line.owed() is not None:
            due.append(number)
            assert line.owed() is waiting or len(due) > 1
            owed = line.owed()
            assert owed is not None
            line.remove(owed)
            line.note_dispatch(owed.queue_priority, "low")
    assert due == [10, 20]


@pytest.mark.parametrize("lane", ["high", "middle"])
def test_equal_and_higher_priorities_have_no_share(lane: str) -> None:
    line: AdmissionQueue[str] = AdmissionQueue(0.25)
    line.add(ticket(lane, 1.0))
    for _ in range(100):
        line.note_dispatch(QueuePriority(1, 0.0), "other")
    assert line.owed() is None


def test_late_requests_gain_priority() -> None:
    line: AdmissionQueue[str] = AdmissionQueue(0.0)
    line.add(old := ticket("low", 0.0, patience_s=10.0))
    line.add(new := ticket("middle", 100.0, patience_s=10.0))
    assert line.head(9.0) is new
    assert line.head(11.0) is old  # one priority higher, and the earlier deadline
