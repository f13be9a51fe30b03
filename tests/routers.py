"""Routers that admit every request at once, for tests that are not about admission."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from baton.explain.timelines import TimelineStore
from cluster.admission.admission import Admission
from cluster.admission.admission_config import AdmissionConfig
from cluster.autoscaling.traffic import TrafficMeter
from cluster.config.router_config import RouterConfig
from cluster.control_plane import request_observers
from cluster.dispatch.router import Router
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import ModelCard
from cluster.requests.request_observers import RequestObserver
from cluster.routing.dispatcher import Dispatcher, Placement
from cluster.routing.request_predictions import RequestPredictions
from cluster.telemetry.metrics import RouterMetrics


def admission_off(
    dispatcher: Dispatcher,
    registry: WorkerRegistry,
    metrics: RouterMetrics,
    worker_wait_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Admission[Placement]:
    """Disabled admission: requests wait only for workers."""
    return Admission(
        dispatcher,
        AdmissionConfig(mode="off"),
        metrics.admission,
        worker_wait_s=worker_wait_s,
        clock=clock,
    )


async def no_check(worker_id: str) -> None:
    """Judges no worker."""


def make_router(
    card: ModelCard,
    registry: WorkerRegistry,
    metrics: RouterMetrics,
    predictions: RequestPredictions,
    admission: Admission[Placement],
    config: RouterConfig | None = None,
    timelines: TimelineStore | None = None,
    more_observers: Sequence[RequestObserver] = (),
    check: Callable[[str], Awaitable[None]] = no_check,
) -> Router:
    """A router with all observers of requests, as in a control plane."""
    timelines = TimelineStore(100) if timelines is None else timelines
    observers = request_observers(metrics, timelines, predictions, admission, TrafficMeter(), more=more_observers)
    return Router(card, registry, config or RouterConfig(), admission, observers, check)
