"""Where a request would run now, and whether there is room for it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.core.slo import SloClass
from cluster.admission.admission_queue import QueuedRequest
from cluster.admission.admitted import AdmittedWork
from cluster.admission.room import RoomCheck, Shortages, check_room, routes_with_room
from cluster.admission.worker_wait import WorkerWait
from cluster.requests.request_record import RequestRecord
from cluster.routing.routing_contracts import Preference, RouteDecision


class Forecasts:
    """Forecasts and room checks of requests, each as of its call. Nothing is booked here.

    Args:
        slack: as in :func:`check_room`.
        work: what was admitted.
        shortages: classes that found no room of late.
        others_work: whether other routers have anything in progress on the same workers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        worker_wait: WorkerWait,
        slack: float,
        work: AdmittedWork,
        shortages: Shortages,
        others_work: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._worker_wait = worker_wait
        self._slack = slack
        self._work = work
        self._shortages = shortages
        self._others_work = others_work
        self._clock = clock

    async def first(self, record: RequestRecord, *, is_let_in: bool = False) -> RouteDecision:
        """Waits for a route and returns the best one, with errors as :meth:`WorkerWait.first_route`.

        Args:
            is_let_in: the request needs no room.
        """
        return await self._worker_wait.first_route(record, None if is_let_in else self._with_room(record.request.slo))

    def best(self, record: RequestRecord) -> RouteDecision | None:
        """The best route with room, or the best of all if none has room; ``None`` if there is no route."""
        return self._worker_wait.forecast(record, self._with_room(record.request.slo))

    def check(self, queued: QueuedRequest[Any], decision: RouteDecision) -> RoomCheck:
        """Whether the route has room for the request."""
        return check_room(
            decision,
            queued.slo,
            elapsed_ms=max(0.0, self._clock() - queued.record.received_s) * 1e3,
            slack=self._slack,
            factors=self._work.factors(queued.slo),
            max_tokens=queued.record.request.params.max_tokens,
            residents_tpot_ms=self._work.residents_tpot_ms(decision.decode_id),
            is_idle=not self._work.in_progress.num_sequences and not self._others_work(),
            is_crowded=self._shortages.lasts(self._clock(), waiting=queued.ticket is not None),
        )

    def judge(self, queued: QueuedRequest[Any], decision: RouteDecision) -> tuple[RouteDecision, RoomCheck]:
        """Returns the route to book and its room check. A lost request steps back, which changes the forecast."""
        check = self.check(queued, decision)
        if check.is_lost and check.shortage is None:
            queued.step_back(self._clock())
            decision = self.best(queued.record) or decision
            check = self.check(queued, decision)
        return decision, check

    def _with_room(self, slo: SloClass) -> Preference:
        factors = self._work.factors(slo)
        return lambda candidates: routes_with_room(candidates, self._slack, factors, self._work.residents_tpot_ms)
