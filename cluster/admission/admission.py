"""Admission control: every sequence is dispatched at once, waits in the queue, or is refused.

    admit ── forecast ──┬── room, and no more urgent request waits ── book ── go   (perhaps after a batching delay)
                        ├── the class may wait, and will get room in time ── queue ── poke … book ── go
                        └── else: 429, at once

Everything between a forecast and its booking is synchronous, so that each forecast sees what was booked before it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import Any, Generic, TypeVar

from baton.core.errors import OverloadedError
from baton.core.slo import BUILTIN_CLASSES, SloClass
from baton.core.timeline import AwaitedRoom, Event
from baton.core.timers import RESOLUTION_S
from cluster.admission import refusals, tuning
from cluster.admission.admission_config import AdmissionConfig
from cluster.admission.admission_metrics import AdmissionMetrics
from cluster.admission.admission_queue import AdmissionQueue, Alarm, QueuedRequest, Ticket
from cluster.admission.admitted import AdmittedWork
from cluster.admission.batching_delay import BatchingDelay, DelayedRequests
from cluster.admission.forecasts import Forecasts
from cluster.admission.room import RoomCheck, Shortage, Shortages
from cluster.admission.waiting_time import Blockage
from cluster.admission.worker_wait import Dispatcher, Placement, WorkerWait
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import RequestRecord
from cluster.routing.routing_contracts import RouteDecision

PlacementT = TypeVar("PlacementT", bound=Placement)


class Admission(RequestObserver, Generic[PlacementT]):
    """Decides when each request is dispatched.

    Args:
        dispatcher: chooses and books routes.
        classes: SLO classes of the configuration.
        worker_wait_s: how long a request waits while a pool has no worker at all.
        batching_delay: ``None`` disables batching delays.
        others_work: whether other routers have anything in progress on the same workers.
        clock: monotonic seconds, as in the timelines.
        waking_pools: as in :class:`WorkerWait`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[PlacementT],
        config: AdmissionConfig,
        metrics: AdmissionMetrics,
        classes: Iterable[SloClass] = BUILTIN_CLASSES,
        *,
        worker_wait_s: float = 30.0,
        batching_delay: BatchingDelay | None = None,
        others_work: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        waking_pools: Collection[str] = (),
    ) -> None:
        self._dispatcher = dispatcher
        self._config = config
        self._metrics = metrics
        self._batching_delay = batching_delay if config.gather_ms else None
        self._clock = clock
        self._work = AdmittedWork(classes)
        self._worker_wait = WorkerWait(dispatcher, worker_wait_s, clock, waking_pools)
        self._queue: AdmissionQueue[QueuedRequest[PlacementT]] = AdmissionQueue(config.fair_share)
        self._delayed: DelayedRequests[QueuedRequest[PlacementT]] = DelayedRequests(self._settle)
        self._blockage = Blockage(Shortage.PREFILL)  # of the last head of the queue that found no room
        self._shortages = Shortages()
        self._forecasts = Forecasts(self._worker_wait, config.slack, self._work, self._shortages, others_work, clock)
        self._alarm = Alarm(self._look, clock)
        self._looked_s = -inf
        self._is_closed = False
        metrics.queued = lambda: Counter(ticket.item.slo.name for ticket in self._queue)
        metrics.factors = self._work.all_factors

    @property
    def is_ready(self) -> bool:
        """Whether requests find workers, which may have to start first."""
        return self._worker_wait.is_ready

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_in_progress(self) -> int:
        """Sequences that were admitted and have not ended."""
        return self._work.in_progress.num_sequences

    async def admit(self, record: RequestRecord) -> PlacementT:
        """Waits for room and books a placement, which the caller must release.

        An attempt after a failure is dispatched at once, since the request was admitted already.

        Raises:
            OverloadedError: there is no room, or the router is stopping.
            NoWorkerError: a pool had no worker for too long.
            DeadlineError: the request's own deadline has passed.
        """
        if self._is_closed:
            raise self._counted(record.request.slo, refusals.stopping())
        queued = self._new_request(record, self._clock())
        is_let_in = self._config.mode == "off" or record.attempt > 1
        decision = await self._first_route(record, is_let_in=is_let_in)
        if is_let_in:
            return self._dispatch(queued, decision, self._forecasts.check(queued, decision), had_room=False)
        if self._batching_delay is not None:
            self._batching_delay.arrived(self._clock())
        placement = self._decide(queued, decision)
        return await self._wait(queued) if placement is None else placement

    def set_classes(self, classes: Iterable[SloClass]) -> None:
        """Changes the SLO classes for requests to come."""
        self._work.set_classes(classes)

    def first_token(self, record: RequestRecord) -> None:
        """Looks at the queue, since there may be room now."""
        self._work.first_token(record)
        self.poke()

    def ended(self, record: RequestRecord) -> None:
        """Looks at the queue, since there may be room now."""
        self._work.ended(record, self._clock())
        self.poke()

    def poke(self) -> None:
        """Schedules a look at the queue. Does nothing while it is empty; a burst of calls causes one look."""
        if len(self._queue):
            self._alarm.set(max(self._clock(), self._looked_s + tuning.SHORTEST_PAUSE_S))

    def close(self) -> None:
        """Refuses all waiting and all later requests."""
        self._is_closed = True
        self._worker_wait.close()
        self._alarm.cancel()
        for queued in [*self._queue.clear(), *self._delayed.clear()]:
            self._refuse(queued, refusals.stopping())

    def status(self) -> dict[str, Any]:
        """The queued requests and the margins of each class; JSON-ready."""
        return self._metrics.status()

    def _new_request(self, record: RequestRecord, now_s: float) -> QueuedRequest[PlacementT]:
        # The patience of workers, the TTFT target, would let requests that wait here for minutes overtake all others.
        return QueuedRequest(record, record.queue_priority._replace(patience_s=self._config.patience), now_s)

    async def _first_route(self, record: RequestRecord, *, is_let_in: bool = False) -> RouteDecision:
        """Waits for a route and returns the best one. Raises the errors of :meth:`admit`."""
        try:
            return await self._forecasts.first(record, is_let_in=is_let_in)
        except OverloadedError as error:  # the router is stopping
            raise self._counted(record.request.slo, error) from None

    def _decide(self, queued: QueuedRequest[PlacementT], decision: RouteDecision) -> PlacementT | None:
        """Returns a placement, or ``None`` if the request waits from now on.

        Raises:
            OverloadedError: the request is refused.
        """
        decision, check = self._forecasts.judge(queued, decision)
        num_ahead = self._num_ahead(queued, check)
        if check.shortage is None and not num_ahead:
            delay_s = self._delay_s(queued, decision, check)
            if delay_s > 0:
                queued.was_delayed = True
                queued.record.timeline.attributes["admission_waited_for"] = AwaitedRoom.GATHERING
                self._delayed.add(queued, delay_s)
                return None
            if not self._delayed:
                return self._dispatch(queued, decision, check)
            # No overtaking: delayed requests go first, which changes the forecast.
            self._delayed.open()
            decision = self._forecasts.best(queued.record) or decision
            decision, check = self._forecasts.judge(queued, decision)
            num_ahead = self._num_ahead(queued, check)
            if check.shortage is None and not num_ahead:
                return self._dispatch(queued, decision, check)
        self._enqueue(queued, decision, check, num_ahead)
        return None

    def _num_ahead(self, queued: QueuedRequest[PlacementT], check: RoomCheck) -> int:
        """The number of queued requests that go before this one.

        A request that may not wait, has room and can meet its target overtakes requests that cannot meet theirs, except
        while a higher class finds no room.
        """
        now_s, slo = self._clock(), queued.slo
        overtakes = slo.queue_deadline_s <= 0 and check.shortage is None and not check.is_lost
        overtakes = overtakes and not self._shortages.lasts(now_s, waiting=False, above=slo.priority)
        return self._queue.num_ahead(queued.queue_priority, now_s, yielding=not overtakes)

    def _enqueue(
        self, queued: QueuedRequest[PlacementT], decision: RouteDecision, check: RoomCheck, num_ahead: int
    ) -> None:
        now_s, slo = self._clock(), queued.slo
        queued.record.timeline.attributes["admission_waited_for"] = check.awaited
        if check.shows_crowd:
            self._shortages.note(slo.priority, now_s)
        own = self._work.in_progress.blockage(decision, check)
        if own is not None and not num_ahead:
            self._blockage = own
        # A request with room waits only for those ahead, which wait for what blocks the first of them.
        mean_max_tokens = self._queue.mean_weight or queued.max_tokens
        wait_s = self._work.in_progress.wait_s(own or self._blockage, num_ahead, mean_max_tokens)
        if check.is_lost:
            wait_s = max(wait_s, self._shortages.left_s(now_s))
        allowed_s = min(slo.queue_deadline_s, now_s - queued.queued_s + queued.record.time_left_s)
        expires_s = queued.queued_s + allowed_s
        if now_s + wait_s > expires_s or slo.queue_deadline_s <= 0:
            raise self._counted(slo, refusals.no_room(slo, check, decision, wait_s, allowed_s))
        if len(self._queue) >= self._config.max_queued:
            self._make_place(queued, wait_s)
        queued.ticket = Ticket(queued, slo.name, queued.queue_priority, expires_s, slo.name, queued.max_tokens)
        self._queue.add(queued.ticket)
        self._alarm.set(now_s + tuning.QUEUE_TICK_S)

    def _make_place(self, queued: QueuedRequest[PlacementT], wait_s: float) -> None:
        now_s, last = self._clock(), self._queue.tail(self._clock())
        full = refusals.queue_full(queued.slo, self._config.max_queued, wait_s)
        if last is None or last.queue_priority.key(now_s) <= queued.queue_priority.key(now_s):
            raise self._counted(queued.slo, full)
        self._queue.remove(last)
        self._refuse(last.item, refusals.queue_full(last.item.slo, self._config.max_queued, wait_s))

    async def _wait(self, queued: QueuedRequest[PlacementT]) -> PlacementT:
        placement: PlacementT | None = None
        try:
            while placement is None:
                placement = await queued.result()
                if placement is None:  # there is no route: wait for a worker
                    queued.future = None
                    placement = self._decide(queued, await self._first_route(queued.record))
            return placement
        except asyncio.CancelledError:
            self._leave(queued)
            raise
        finally:
            queued.record.timeline.record(Event.DISPATCHED, self._clock())

    def _leave(self, queued: QueuedRequest[PlacementT]) -> None:
        """Withdraws a request whose client left, and releases its placement if it was just granted one."""
        placement = queued.placement()
        if placement is not None:
            self._work.ended(queued.record, self._clock())
            placement.release()
        if queued.ticket is not None:
            self._queue.remove(queued.ticket)
        self._delayed.remove(queued)
        self.poke()

    def _dispatch(
        self, queued: QueuedRequest[PlacementT], decision: RouteDecision, check: RoomCheck, *, had_room: bool = True
    ) -> PlacementT:
        now_s, slo = self._clock(), queued.slo
        placement = self._dispatcher.book(queued.record, decision)
        self._work.dispatched(queued.record, decision, check, now_s, had_room=had_room)
        if queued.record.attempt == 1:  # later attempts were admitted before
            waited_s = now_s - queued.queued_s
            self._metrics.observe_wait(slo, waited_s)
            queued.record.timeline.attributes["admission_wait_ms"] = round(waited_s * 1e3, 3)
        self._queue.note_dispatch(queued.queue_priority, slo.name)
        if self._queue.owed() is not None:
            self._alarm.set(now_s)
        return placement

    def _delay_s(self, queued: QueuedRequest[PlacementT], decision: RouteDecision, check: RoomCheck) -> float:
        if self._batching_delay is None or queued.was_delayed:
            return 0.0
        delay_ms = self._batching_delay.delay_ms(
            decision,
            queued.num_prompt_tokens,
            slack_ms=check.ttft_target_ms - decision.ttft_ms,
            computes_prompts=self._work.computes_prompts,
            delayed_tokens=sum(other.num_prompt_tokens for other in self._delayed),
        )
        return delay_ms / 1e3

    def _settle(self, queued: QueuedRequest[PlacementT]) -> None:
        """Decides about a request whose batching delay has ended."""
        if queued.is_cancelled:
            return
        self._metrics.observe_batching_delay(self._clock() - queued.queued_s)
        try:
            decision = self._forecasts.best(queued.record)
            if decision is None:
                queued.wait_for_workers()
                return
            placement = self._decide(queued, decision)
        except Exception as error:  # noqa: BLE001 (a timer has no caller, so the waiting request gets the error)
            queued.fail(error)
        else:
            if placement is not None:
                queued.grant(placement)

    def _look(self) -> None:
        now_s = self._looked_s = self._clock()
        for queued in [ticket.item for ticket in self._queue.pop_expired(now_s + RESOLUTION_S)]:
            waited_s = now_s - queued.queued_s
            self._refuse(
                queued, refusals.deadline_exceeded(queued.slo, waited_s, waited_s + queued.slo.queue_deadline_s)
            )
        for _ in range(tuning.DISPATCHES_PER_TURN):
            if not self._dispatch_next():
                break
        else:
            self._alarm.set(self._clock())
        expiry_s = self._queue.next_expiry_s()
        if expiry_s is not None:
            self._alarm.set(min(expiry_s, now_s + tuning.QUEUE_TICK_S))

    def _dispatch_next(self) -> bool:
        """Dispatches the next request. Returns False if none can be dispatched now."""
        owed = self._queue.owed()
        ticket = owed or self._queue.head(self._clock())
        if ticket is None:
            return False
        queued = ticket.item
        if queued.is_cancelled:
            return self._queue.remove(ticket)
        try:
            if queued.is_lost:
                queued.step_back(self._clock())
            decision = self._forecasts.best(queued.record)
            if decision is None:
                self._give_up_workers()
                return False
            check = self._forecasts.check(queued, decision)
            if check.is_lost and not queued.is_lost:
                self._put_behind(queued, ticket)
                return True
            if check.shows_crowd:
                self._shortages.note(queued.slo.priority, self._clock())
            blockage = self._work.in_progress.blockage(decision, check)
            if blockage is not None and owed is None:
                self._blockage = blockage
                return False
            self._queue.remove(ticket)
            placement = self._dispatch(queued, decision, check, had_room=blockage is None)
        except Exception as error:  # noqa: BLE001 (a timer has no caller, so the waiting request gets the error)
            self._queue.remove(ticket)
            queued.fail(error)
            return True
        queued.grant(placement)
        return True

    def _give_up_workers(self) -> None:
        """Fails all waiting requests if there has been no route for ``worker_wait_s``."""
        if self._worker_wait.is_used_up:
            for queued in self._queue.clear():
                queued.fail(self._worker_wait.error())

    def _put_behind(self, queued: QueuedRequest[PlacementT], ticket: Ticket[QueuedRequest[PlacementT]]) -> None:
        """Moves a request that cannot meet its target behind its class, so that it does not delay the others."""
        self._queue.remove(ticket)
        queued.is_lost = True
        queued.queue_priority = ticket.queue_priority._replace(priority=ticket.queue_priority.priority - 1)
        queued.ticket = ticket.late(queued.queue_priority)
        self._queue.add(queued.ticket)

    def _refuse(self, queued: QueuedRequest[PlacementT], error: OverloadedError) -> None:
        queued.fail(self._counted(queued.slo, error))

    def _counted(self, slo: SloClass, error: OverloadedError) -> OverloadedError:
        self._metrics.observe_refusal(slo, error.reason)
        return error
