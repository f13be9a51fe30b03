"""Puts admission together for a router."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.core.roles import PREFILL
from cluster.admission.admission import Admission
from cluster.admission.admission_metrics import AdmissionMetrics
from cluster.admission.gathering import Gatherer
from cluster.config.config import BatonConfig
from cluster.latency.latency_model import LatencyModel
from cluster.registry.workers import WorkerRegistry
from cluster.routing.dispatcher import Dispatcher, Placement


def create_admission(
    config: BatonConfig,
    dispatcher: Dispatcher,
    registry: WorkerRegistry,
    model: LatencyModel,
    metrics: AdmissionMetrics,
    clock: Callable[[], float] = time.monotonic,
) -> Admission[Placement]:
    """Admission as the configuration wants it.

    Args:
        dispatcher: over the workers of ``registry``.
        model: of these workers.
        clock: monotonic seconds; a simulation brings its own.
    """

    def prefill_chunk_tokens() -> dict[str, int]:
        workers = (worker.info for worker in registry.pool(PREFILL) if worker.is_accepting)
        return {info.worker_id: info.chunk_tokens for info in workers}

    return Admission(
        dispatcher,
        config.admission,
        metrics,
        config.slo.to_classes().all,
        worker_wait_s=config.router.worker_wait_s,
        workers_changed=lambda: registry.changed,
        gatherer=Gatherer(model, prefill_chunk_tokens),
        clock=clock,
    )
