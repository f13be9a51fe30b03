"""Every sequence passes here on its way to workers: it goes, waits, or is refused.

    admit ── forecast ──┬── room, and nobody more urgent waits ── book ── go           (perhaps after gathering)
                        ├── the class may wait, and will get room in time ── queue ── poke … book ── go
                        └── else: 429, at once

Everything between a forecast and its booking is synchronous, so that each forecast sees what was booked before it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Generic, TypeVar

from baton.core.errors import OverloadedError
from baton.core.slo import BUILTIN_CLASSES, SloClass
from baton.core.timeline import Event
from baton.core.timers import RESOLUTION_S
from cluster.admission import refusals
from cluster.admission.admission_config import AdmissionConfig
from cluster.admission.admission_metrics import AdmissionMetrics
from cluster.admission.admitted import AdmittedWork
from cluster.admission.alarm import Alarm
from cluster.admission.asking import Asking
from cluster.admission.contracts import Dispatcher, Placement
from cluster.admission.gathering import Gatherer
from cluster.admission.holding_room import HoldingRoom
from cluster.admission.room import RoomCheck, Shortage, check_room, routes_with_room
from cluster.admission.shortages import Shortages
from cluster.admission.waiting_line import Ticket, WaitingLine
from cluster.admission.waiting_time import Blockage
from cluster.admission.worker_wait import WorkerWait
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import RequestRecord
from cluster.routing.base import Preference, RouteDecision

PlacementT = TypeVar("PlacementT", bound=Placement)

_TICK_S = 0.5
"""Suspects become usable and predictions change with time alone, so the queue looks at its head at least so often."""
_SHORTEST_PAUSE_S = 0.002
"""Between two looks: tokens and ends come in bursts."""
_MOST_AT_ONCE = 16
"""Dispatches before other work of the event loop gets its turn."""


class Admission(RequestObserver, Generic[PlacementT]):
    """
    Args:
        dispatcher: chooses routes and books them.
        classes: SLO classes of the configuration.
        worker_wait_s: how long a request waits while a pool has no worker at all.
        workers_changed: gives the event that is set at the next change of the workers.
        gatherer: None: prompts never wait for company.
        clock: monotonic seconds, those of the timelines.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[PlacementT],
        config: AdmissionConfig,
        metrics: AdmissionMetrics,
        classes: Iterable[SloClass] = BUILTIN_CLASSES,
        *,
        worker_wait_s: float = 30.0,
        workers_changed: Callable[[], asyncio.Event] = asyncio.Event,
        gatherer: Gatherer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._config = config
        self._metrics = metrics
        self._gatherer = gatherer if config.gather else None
        self._clock = clock
        self._work = AdmittedWork(classes)
        self._worker_wait = WorkerWait(dispatcher, worker_wait_s, workers_changed, clock)
        self._queue: WaitingLine[Asking[PlacementT]] = WaitingLine(config.fair_share)
        self._held: HoldingRoom[Asking[PlacementT]] = HoldingRoom(self._settle)
        self._blockage = Blockage(Shortage.PREFILL, 0.0, 0.0, 0.0)  # of the last head of the queue that could not go
        self._shortages = Shortages()
        self._alarm = Alarm(self._look, clock)
        self._looked_s = -inf
        self._is_closed = False
        metrics.queued = lambda: Counter(ticket.item.slo.name for ticket in self._queue)
        metrics.factors = self._work.all_factors

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_under_way(self) -> int:
        """Sequences that were let in and are not over."""
        return self._work.under_way.num_sequences

    async def admit(self, record: RequestRecord) -> PlacementT:
        """A place on a route, booked; whoever gets it releases it.

        An attempt after a failure goes at once: the request was let in already.

        Raises:
            OverloadedError: there is no room, or the router stops.
            NoWorkerError: a pool had no worker for too long.
            DeadlineError: the request's own time is over.
        """
        if self._is_closed:
            raise self._counted(record.request.slo, refusals.stopping())
        asking = self._ask(record, self._clock())
        is_let_in = self._config.mode == "off" or record.attempt > 1
        decision = await self._first_route(record, is_let_in=is_let_in)
        if is_let_in:
            return self._dispatch(asking, decision, self._check(asking, decision), had_room=False)
        if self._gatherer is not None:
            self._gatherer.arrived(self._clock())
        placement = self._decide(asking, decision)
        return await self._wait(asking) if placement is None else placement

    def first_token(self, record: RequestRecord) -> None:
        """There may be room for others."""
        self._work.first_token(record)
        self.poke()

    def ended(self, record: RequestRecord) -> None:
        """There may be room for others."""
        self._work.ended(record, self._clock())
        self.poke()

    def poke(self) -> None:
        """There may be room now. Costs nothing while nobody waits, and calls in a burst are one."""
        if len(self._queue):
            self._alarm.set(max(self._clock(), self._looked_s + _SHORTEST_PAUSE_S))

    def close(self) -> None:
        """Refuses all that wait, and whoever comes."""
        self._is_closed = True
        self._worker_wait.close()
        self._alarm.cancel()
        for asking in [*self._queue.clear(), *self._held.clear()]:
            self._refuse(asking, refusals.stopping())

    def status(self) -> dict[str, Any]:
        """JSON-ready: by class how many wait, and the margins."""
        return self._metrics.status()

    def _ask(self, record: RequestRecord, now_s: float) -> Asking[PlacementT]:
        # With the patience of workers, those who wait here for minutes would soon go before everybody else.
        return Asking(record, record.urgency._replace(patience_s=self._config.patience), now_s, record.received_s)

    async def _first_route(self, record: RequestRecord, *, is_let_in: bool = False) -> RouteDecision:
        """The best route, as soon as there is one. Raises what :meth:`admit` does."""
        preferred = None if is_let_in else self._with_room(record.request.slo)
        try:
            return await self._worker_wait.first_route(record, preferred)
        except OverloadedError as error:  # the router stops
            raise self._counted(record.request.slo, error) from None

    def _forecast(self, record: RequestRecord) -> RouteDecision | None:
        """The best of the routes that have room, or else of all."""
        return self._worker_wait.forecast(record, self._with_room(record.request.slo))

    def _with_room(self, slo: SloClass) -> Preference:
        slack, factors = self._config.slack, self._work.factors(slo)
        return lambda candidates: routes_with_room(candidates, slack, factors, self._work.residents_tpot_ms)

    def _check(self, asking: Asking[PlacementT], decision: RouteDecision) -> RoomCheck:
        return check_room(
            decision,
            asking.slo,
            elapsed_ms=max(0.0, self._clock() - asking.received_s) * 1e3,
            slack=self._config.slack,
            factors=self._work.factors(asking.slo),
            max_tokens=asking.record.request.params.max_tokens,
            residents_tpot_ms=self._work.residents_tpot_ms(decision.decode_id),
            is_idle=not self._work.under_way.num_sequences,
            is_crowded=self._shortages.lasts(self._clock(), waiting=asking.ticket is not None),
        )

    def _judge(self, asking: Asking[PlacementT], decision: RouteDecision) -> tuple[RouteDecision, RoomCheck]:
        """The route to book, and whether it has room. Who is lost steps back, which changes the forecast."""
        check = self._check(asking, decision)
        if check.is_lost and check.shortage is None:
            asking.step_back(self._clock())
            decision = self._forecast(asking.record) or decision
            check = self._check(asking, decision)
        return decision, check

    def _decide(self, asking: Asking[PlacementT], decision: RouteDecision) -> PlacementT | None:
        """A placement; None: the request waits from now on.

        Raises:
            OverloadedError: it is refused.
        """
        decision, check = self._judge(asking, decision)
        num_ahead = self._num_ahead(asking, check)
        if check.shortage is None and not num_ahead:
            hold_s = self._hold_s(asking, decision, check)
            if hold_s > 0:
                asking.was_held = True
                self._held.add(asking, hold_s)
                return None
            if not self._held:
                return self._dispatch(asking, decision, check)
            # No overtaking: those that are held go first, and then the forecast is another one.
            self._held.open()
            decision = self._forecast(asking.record) or decision
            decision, check = self._judge(asking, decision)
            num_ahead = self._num_ahead(asking, check)
            if check.shortage is None and not num_ahead:
                return self._dispatch(asking, decision, check)
        self._enqueue(asking, decision, check, num_ahead)
        return None

    def _num_ahead(self, asking: Asking[PlacementT], check: RoomCheck) -> int:
        """Who may not wait, has room and can be in time is not refused for the sake of those who cannot.

        But it is while a higher class finds no room, which would miss what it took.
        """
        now_s, slo = self._clock(), asking.slo
        overtakes = slo.queue_deadline_s <= 0 and check.shortage is None and not check.is_lost
        overtakes = overtakes and not self._shortages.lasts(now_s, waiting=False, above=slo.priority)
        return self._queue.num_ahead(asking.urgency, now_s, yielding=not overtakes)

    def _enqueue(self, asking: Asking[PlacementT], decision: RouteDecision, check: RoomCheck, num_ahead: int) -> None:
        now_s, slo = self._clock(), asking.slo
        if check.shows_crowd:
            self._shortages.note(slo.priority, now_s)
        own = Blockage.of(decision, check)
        if own is not None and not num_ahead:
            self._blockage = own
        # Who would have room waits for others only, and they for what blocks the first of them.
        max_tokens = asking.record.request.params.max_tokens
        wait_s = self._work.under_way.wait_s(own or self._blockage, num_ahead, max_tokens)
        if check.is_lost:
            wait_s = max(wait_s, self._shortages.left_s(now_s))
        allowed_s = min(slo.queue_deadline_s, now_s - asking.asked_s + asking.record.time_left_s)
        expires_s = asking.asked_s + allowed_s
        if now_s + wait_s > expires_s or slo.queue_deadline_s <= 0:
            raise self._counted(slo, refusals.no_room(slo, check, decision, wait_s, allowed_s))
        if len(self._queue) >= self._config.max_queued:
            self._make_place(asking, wait_s)
        asking.ticket = Ticket(asking, slo.name, asking.urgency, expires_s, slo.name)
        self._queue.add(asking.ticket)
        self._alarm.set(now_s + _TICK_S)

    def _make_place(self, asking: Asking[PlacementT], wait_s: float) -> None:
        now_s, last = self._clock(), self._queue.tail(self._clock())
        full = refusals.queue_full(asking.slo, self._config.max_queued, wait_s)
        if last is None or last.urgency.key(now_s) <= asking.urgency.key(now_s):
            raise self._counted(asking.slo, full)
        self._queue.remove(last)
        self._refuse(last.item, refusals.queue_full(last.item.slo, self._config.max_queued, wait_s))

    async def _wait(self, asking: Asking[PlacementT]) -> PlacementT:
        placement: PlacementT | None = None
        try:
            while placement is None:
                placement = await asking.answer()
                if placement is None:  # it has to ask again
                    asking.future = None
                    placement = self._decide(asking, await self._first_route(asking.record))
            return placement
        except asyncio.CancelledError:
            self._leave(asking)
            raise
        finally:
            asking.record.timeline.record(Event.DISPATCHED, self._clock())

    def _leave(self, asking: Asking[PlacementT]) -> None:
        """Its client is gone, perhaps in the moment in which it got its place."""
        placement = asking.placement()
        if placement is not None:
            self._work.ended(asking.record, self._clock())
            placement.release()
        if asking.ticket is not None:
            self._queue.remove(asking.ticket)
        self._held.remove(asking)
        self.poke()

    def _dispatch(
        self, asking: Asking[PlacementT], decision: RouteDecision, check: RoomCheck, *, had_room: bool = True
    ) -> PlacementT:
        now_s, slo = self._clock(), asking.slo
        placement = self._dispatcher.book(asking.record, decision)
        self._work.dispatched(asking.record, decision, check, now_s, had_room=had_room)
        if asking.record.attempt == 1:  # later ones were let in before
            waited_s = now_s - asking.asked_s
            self._metrics.observe_wait(slo, waited_s)
            asking.record.timeline.attributes["admission_wait_ms"] = round(waited_s * 1e3, 3)
        self._queue.note_dispatch(asking.urgency, slo.name)
        if self._queue.owed() is not None:
            self._alarm.set(now_s)
        return placement

    def _hold_s(self, asking: Asking[PlacementT], decision: RouteDecision, check: RoomCheck) -> float:
        if self._gatherer is None or asking.was_held:
            return 0.0
        hold_ms = self._gatherer.hold_ms(
            decision,
            asking.num_prompt_tokens,
            slack_ms=check.ttft_target_ms - decision.ttft_ms,
            computes_prompts=self._work.computes_prompts,
            held_tokens=sum(held.num_prompt_tokens for held in self._held),
        )
        return hold_ms / 1e3

    def _settle(self, asking: Asking[PlacementT]) -> None:
        """Company or not, it goes on now."""
        if asking.is_gone:
            return
        self._metrics.observe_gathering(self._clock() - asking.asked_s)
        try:
            decision = self._forecast(asking.record)
            if decision is None:
                asking.ask_again()
                return
            placement = self._decide(asking, decision)
        except Exception as error:  # noqa: BLE001 (a timer has no caller: whoever waits gets the error, others go on)
            asking.fail(error)
        else:
            if placement is not None:
                asking.give(placement)

    def _look(self) -> None:
        now_s = self._looked_s = self._clock()
        for asking in [ticket.item for ticket in self._queue.pop_expired(now_s + RESOLUTION_S)]:
            waited_s = now_s - asking.asked_s
            self._refuse(asking, refusals.deadline_over(asking.slo, waited_s, waited_s + asking.slo.queue_deadline_s))
        for _ in range(_MOST_AT_ONCE):
            if not self._dispatch_next():
                break
        else:
            self._alarm.set(self._clock())
        expiry_s = self._queue.next_expiry_s()
        if expiry_s is not None:
            self._alarm.set(min(expiry_s, now_s + _TICK_S))

    def _dispatch_next(self) -> bool:
        """Sends the next one; False when nobody can go now."""
        owed = self._queue.owed()
        ticket = owed or self._queue.head(self._clock())
        if ticket is None:
            return False
        asking = ticket.item
        if asking.is_gone:
            return self._queue.remove(ticket)
        try:
            if asking.is_lost:
                asking.step_back(self._clock())
            decision = self._forecast(asking.record)
            if decision is None:
                self._give_up_workers()
                return False
            check = self._check(asking, decision)
            if check.is_lost and not asking.is_lost:
                self._put_behind(asking, ticket)
                return True
            if check.shows_crowd:
                self._shortages.note(asking.slo.priority, self._clock())
            blockage = Blockage.of(decision, check)
            if blockage is not None and owed is None:
                self._blockage = blockage
                return False
            self._queue.remove(ticket)
            placement = self._dispatch(asking, decision, check, had_room=blockage is None)
        except Exception as error:  # noqa: BLE001 (a timer has no caller: whoever waits gets the error, others go on)
            self._queue.remove(ticket)
            asking.fail(error)
            return True
        asking.give(placement)
        return True

    def _give_up_workers(self) -> None:
        """There is no route. Once that has been so for too long, nobody waits for one any more."""
        if self._worker_wait.is_used_up:
            for asking in self._queue.clear():
                asking.fail(self._worker_wait.error())

    def _put_behind(self, asking: Asking[PlacementT], ticket: Ticket[Asking[PlacementT]]) -> None:
        """Its target is lost: it goes behind those of its class that can keep theirs, or else all would be late."""
        self._queue.remove(ticket)
        asking.is_lost = True
        asking.urgency = ticket.urgency._replace(priority=ticket.urgency.priority - 1)
        asking.ticket = ticket.late(asking.urgency)
        self._queue.add(asking.ticket)

    def _refuse(self, asking: Asking[PlacementT], error: OverloadedError) -> None:
        asking.fail(self._counted(asking.slo, error))

    def _counted(self, slo: SloClass, error: OverloadedError) -> OverloadedError:
        self._metrics.observe_refusal(slo, error.reason)
        return error
