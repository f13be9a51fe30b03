"""The way into a router for tests that are not about admission: everybody goes at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.admission.admission import Admission
from cluster.admission.admission_config import AdmissionConfig
from cluster.registry.workers import WorkerRegistry
from cluster.routing.dispatcher import Dispatcher, Placement
from cluster.telemetry.metrics import RouterMetrics


def open_entry(
    dispatcher: Dispatcher,
    registry: WorkerRegistry,
    metrics: RouterMetrics,
    worker_wait_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Admission[Placement]:
    """Admission that is off: requests wait only for workers."""
    return Admission(
        dispatcher,
        AdmissionConfig(mode="off"),
        metrics.admission,
        worker_wait_s=worker_wait_s,
        workers_changed=lambda: registry.changed,
        clock=clock,
    )
