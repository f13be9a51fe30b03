"""How requests get their places on workers: the contract, and the way without admission control."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from cluster.admission.worker_wait import WorkerWait
from cluster.dispatcher import Dispatcher, Placement
from cluster.journal import Journal
from cluster.latency.request_predictions import RequestPredictions
from cluster.registry import WorkerRegistry
from cluster.routing.profile import build_profile
from cluster.routing_config import RoutingConfig
from cluster.routing_metrics import RoutingMetrics


class Entry(Protocol):
    async def admit(self, journal: Journal) -> Placement:
        """A place for the next attempt, booked; the caller releases it, and waits for nothing before it holds it.

        Raises:
            OverloadedError: there is no room.
            NoWorkerError: there was no worker for too long.
            DeadlineError: the request's own time is over.
        """
        ...

    def first_token(self, journal: Journal) -> None:
        """A prompt is computed."""
        ...

    def ended(self, journal: Journal) -> None:
        """A sequence is over, however it went."""
        ...


class OpenEntry:
    """Everybody goes at once. Requests wait only for workers, so that a restart is a pause and not an error."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: WorkerRegistry,
        worker_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._worker_wait = WorkerWait(dispatcher, worker_wait_s, lambda: registry.changed, clock)

    async def admit(self, journal: Journal) -> Placement:
        """See :class:`Entry`."""
        return self._dispatcher.book(journal, await self._worker_wait.first_route(journal))

    def first_token(self, journal: Journal) -> None:
        """See :class:`Entry`; nobody waits for it."""

    def ended(self, journal: Journal) -> None:
        """See :class:`Entry`; nobody waits for it."""


def open_entry(
    routing: RoutingConfig,
    registry: WorkerRegistry,
    predictions: RequestPredictions,
    metrics: RoutingMetrics,
    worker_wait_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> OpenEntry:
    """To a router whose prefix caches nobody watches."""
    chooser = build_profile(routing, predictions.forecaster, metrics.observe_scorer)
    dispatcher = Dispatcher(registry, predictions, chooser, clock=clock, metrics=metrics)
    return OpenEntry(dispatcher, registry, worker_wait_s, clock)
