"""Ordering policies, and the queue that keeps their order."""

from __future__ import annotations

import random
from math import inf

import pytest

from baton.core.queue_priority import QueuePriority
from baton.core.request import Request, RequestStatus, SamplingParams
from baton.engine.scheduling.ordering import ArrivalOrder, EarliestDeadlineFirst, OrderingPolicy
from baton.engine.scheduling.waiting_queue import WaitingQueue


def request(
    name: str, arrival_s: float = 0.0, queue_priority: QueuePriority | None = None, *, preempted: bool = False
) -> Request:
    made = Request(name, [7], SamplingParams(), arrival_s=arrival_s)
    if queue_priority is not None:
        made.queue_priority = queue_priority
    if preempted:
        made.status = RequestStatus.PREEMPTED
    return made


def names(queue: WaitingQueue, now_s: float) -> list[str]:
    return [request.request_id for _, _, request in queue.in_order(now_s)]


def queue_of(ordering: OrderingPolicy, *requests: Request) -> WaitingQueue:
    queue = WaitingQueue(ordering)
    for each in requests:
        queue.add(each, 0.0)
    return queue


def test_priorities_come_first_and_deadlines_decide_within_one() -> None:
    queue = queue_of(
        EarliestDeadlineFirst(),
        request("batch", 0, QueuePriority(0, 60, 60)),
        request("standard, late to come", 3, QueuePriority(1, 4, 15)),
        request("standard", 1, QueuePriority(1, 9, 15)),
        request("interactive", 4, QueuePriority(2, 5, 2)),
    )
    assert names(queue, 0.0) == ["interactive", "standard, late to come", "standard", "batch"]


def test_without_priorities_the_earliest_deadline_is_the_earliest_arrival() -> None:
    arrivals = [request(str(number), arrival_s) for number, arrival_s in enumerate((3, 1, 2, 1))]
    for ordering in (EarliestDeadlineFirst(), ArrivalOrder()):
        assert names(queue_of(ordering, *arrivals), 0.0) == ["1", "3", "2", "0"]


def test_urgent_requests_do_not_starve_others() -> None:
    queue = queue_of(EarliestDeadlineFirst(), request("batch", 0, QueuePriority(0, 10, 5)))
    for now_s in range(1, 40):
        queue.add(request(f"interactive-{now_s}", now_s, QueuePriority(2, now_s + 1, 2)), now_s)
        first = names(queue, now_s)[0]
        if first == "batch":
            # Two priorities are twice its patience; those that came last are on time and have only their own.
            assert now_s >= 10 + 2 * 5
            return
        queue.remove(next(each for each in queue if each.request_id == first))
    raise AssertionError("the batch request never became the first")


def test_arrival_order_ignores_priorities() -> None:
    queue = queue_of(ArrivalOrder(), request("first", 1), request("urgent", 2, QueuePriority(9, 2, 1)))
    assert names(queue, 100.0) == ["first", "urgent"]


@pytest.mark.parametrize("ordering", [ArrivalOrder(), EarliestDeadlineFirst()])
def test_a_preempted_request_goes_first_among_equals(ordering: OrderingPolicy) -> None:
    queue = queue_of(ordering, request("waiting", 1), request("preempted", 2, preempted=True))
    assert names(queue, 0.0) == ["preempted", "waiting"]


def test_a_preempted_request_does_not_precede_a_higher_priority() -> None:
    batch = request("batch", 1, QueuePriority(0, inf, inf), preempted=True)
    queue = queue_of(EarliestDeadlineFirst(), batch, request("interactive", 2, QueuePriority(2, 3, 2)))
    assert names(queue, 2.0) == ["interactive", "batch"]


def test_a_queue_stays_ordered_under_any_changes() -> None:
    rng = random.Random(5)
    ordering = EarliestDeadlineFirst()
    queue = WaitingQueue(ordering)
    inside: list[Request] = []
    for number in range(400):
        now_s = number / 20
        if inside and rng.random() < 0.4:
            queue.remove(inside.pop(rng.randrange(len(inside))))
        queue_priority = QueuePriority(rng.randrange(3), now_s + rng.choice([0.5, 2.0, 15.0]), rng.choice([0.5, 2.0]))
        inside.append(request(str(number), now_s, queue_priority))
        queue.add(inside[-1], now_s)
        assert len(queue) == len(inside)
    expected = sorted(inside, key=lambda each: ordering.key(each, 100.0))
    assert [each for _, _, each in queue.in_order(100.0)] == expected
    with pytest.raises(KeyError):
        queue.remove(request("stranger"))


def test_keys_are_cached_between_reads() -> None:
    class Counting(ArrivalOrder):
        num_keys = 0

        def key(self, request: Request, now_s: float) -> tuple[float, ...]:
            self.num_keys += 1
            return super().key(request, now_s)

    ordering = Counting()
    queue = queue_of(ordering, *(request(str(number), number) for number in range(1000)))
    for step in range(1000):
        queue.in_order(step * 0.01)  # ten seconds of steps
    assert ordering.num_keys <= 1000 + 1000 * 10 / 0.25
