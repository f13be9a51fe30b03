"""Waiting for a worker while admission is off: the wait ends in time, in virtual time as well."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.core.errors import BatonError, DeadlineError, NoWorkerError
from baton.core.request import SamplingParams
from baton.core.roles import DECODE, PREFILL
from baton.core.timeline import Timeline
from cluster.admission.worker_wait import WorkerWait
from cluster.gateway.http_edge import error_response
from cluster.latency.latency_model import LatencyModel
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import GenerationRequest
from cluster.requests.request_record import RequestRecord
from cluster.routing.dispatcher import Dispatcher
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_config import RoutingConfig
from cluster.routing.routing_contracts import Preference, RouteDecision
from cluster.routing.routing_profile import build_profile
from cluster.simulation.virtual_loop import run_virtually
from cluster.telemetry.metrics import RouterMetrics
from tests.credentials import connect
from tests.routers import admission_off

WAIT_S = 5.0
MOST_LOOKS = 100
"""More than one look every half second."""


class LookingDispatcher(Dispatcher):
    """Fails when the queue polls repeatedly at one instant of the clock."""

    num_looks = 0

    def forecast(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
        self.num_looks += 1
        assert self.num_looks <= MOST_LOOKS, "the clock stands still"
        return super().forecast(record, preferred)


@pytest.mark.parametrize(
    ("worker_wait_s", "timeout_s", "error"), [(WAIT_S, 60.0, NoWorkerError), (60.0, WAIT_S, DeadlineError)]
)
def test_a_wait_ends_when_its_timer_fires_early_by_the_clock_resolution(
    worker_wait_s: float, timeout_s: float, error: type[BatonError]
) -> None:
    """Others have work to do, so that no time passes between that timer and the moment for which it was set."""

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        registry, metrics = WorkerRegistry(connect, clock=clock), RouterMetrics(clock=clock)
        predictions = RequestPredictions(LatencyModel(clock), metrics.prediction_errors, clock)
        chooser = build_profile(RoutingConfig(), predictions.forecaster)
        dispatcher = LookingDispatcher(registry, predictions, chooser, clock=clock)
        admission = admission_off(dispatcher, registry, metrics, worker_wait_s, clock)
        request = GenerationRequest("r", (1, 2), SamplingParams(max_tokens=4), Timeline("r", clock=clock))
        waiting = asyncio.ensure_future(admission.admit(RequestRecord(request, timeout_s, clock)))
        await asyncio.sleep(WAIT_S - 5e-10)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert isinstance(waiting.exception(), error)
        assert clock() == pytest.approx(WAIT_S)

    run_virtually(main)


@pytest.mark.parametrize(("waking", "text"), [((PREFILL, DECODE), "one is being started"), ((DECODE,), "No prefill")])
def test_the_error_says_whether_a_worker_is_being_started(waking: tuple[str, ...], text: str) -> None:
    predictions = RequestPredictions(LatencyModel(), RouterMetrics().prediction_errors)
    chooser = build_profile(RoutingConfig(), predictions.forecaster)
    dispatcher = Dispatcher(WorkerRegistry(connect), predictions, chooser)
    error = WorkerWait(dispatcher, WAIT_S, time.monotonic, waking).error()
    assert text in error.message
    assert error_response(error).headers["Retry-After"] == "5"
