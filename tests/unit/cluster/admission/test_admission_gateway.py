"""Admission behind the real router and gateway: what clients, figures and timelines see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from baton.core.request import SamplingParams
from baton.core.slo import INTERACTIVE
from baton.core.timeline import Timeline
from baton.explain.timelines import TimelineStore
from cluster.config.config import BatonConfig
from cluster.control_plane import create_admission
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.latency.latency_model import LatencyModel
from cluster.requests.generation import GenerationRequest, ModelCard
from cluster.requests.request_record import RequestRecord
from cluster.routing.dispatcher import Dispatcher
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_contracts import Preference, RouteDecision, RoutingRequest, WorkerSnapshot
from tests.routers import make_router
from tests.unit.cluster.fakes import MODEL, FakeAdmin
from tests.unit.cluster.instant_cluster import CONTEXT_LENGTH, TOKENIZER, InstantCluster

COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
INTERACTIVELY = {"X-Baton-SLO-Class": "interactive"}


class Busy:
    """A chooser with scripted predictions."""

    def __init__(self) -> None:
        self.ttft_ms = 20.0

    def choose(
        self,
        prefill: Sequence[WorkerSnapshot],
        decode: Sequence[WorkerSnapshot],
        request: RoutingRequest,
        preferred: Preference | None = None,
    ) -> RouteDecision:
        return RouteDecision(
            prefill[0].worker_id,
            decode[0].worker_id,
            cached_tokens=0,
            ttft_ms=request.elapsed_ms + self.ttft_ms,
            tpot_ms=10.0,
            idle_ttft_ms=20.0,
            idle_tpot_ms=10.0,
            wait_ms=self.ttft_ms - 20.0,
        )


class Scene:
    def __init__(self) -> None:
        self.chooser = Busy()
        self.cluster = InstantCluster()
        self.timelines = TimelineStore(50)

    async def start(self) -> httpx.AsyncClient:
        await self.cluster.start()
        metrics, registry = self.cluster.metrics, self.cluster.registry
        config = BatonConfig()
        predictions = RequestPredictions(LatencyModel(), metrics.prediction_errors)
        dispatcher = Dispatcher(registry, predictions, self.chooser)
        self.admission = create_admission(config, dispatcher, registry, predictions.model, metrics.admission)
        card = ModelCard(MODEL, CONTEXT_LENGTH, TOKENIZER.vocab_size, 0, frozenset({TOKENIZER.eos_token_id or 0}))
        self.router = make_router(card, registry, metrics, predictions, self.admission, config.router, self.timelines)
        app = create_app(self.router, TOKENIZER, FakeAdmin(), GatewayLimits(), metrics.http)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    def record(self) -> RequestRecord:
        request = GenerationRequest("other", (1, 2), SamplingParams(max_tokens=4), Timeline("other"), slo=INTERACTIVE)
        record = RequestRecord(request, 60.0)
        record.attempt = 1
        return record

    def value(self, name: str, **labels: str) -> float | None:
        return self.cluster.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    scene.admission.close()
    await scene.cluster.stop()


async def test_a_busy_cluster_refuses_with_reason_wait_and_retry_after(scene: Scene) -> None:
    async with await scene.start() as http:
        assert (await http.post("/v1/completions", json=COMPLETION, headers=INTERACTIVELY)).status_code == 200
        prompt_tokens = scene.value("baton_prompt_tokens_total")
        assert prompt_tokens
        with await scene.admission.admit(scene.record()):  # another request is there, so that load can be the reason
            scene.chooser.ttft_ms = 4000.0
            response = await http.post("/v1/completions", json=COMPLETION, headers=INTERACTIVELY)
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["type"], error["code"], error["reason"]) == ("rate_limit_error", "overloaded", "prefill")
    assert "SLO class 'interactive' is 1000 ms" in error["message"]
    assert error["predicted_wait_ms"] >= 3000
    assert int(response.headers["retry-after"]) >= 3
    assert scene.value("baton_slo_requests_total", slo_class="interactive", result="rejected") == 1
    assert scene.value("baton_admission_refusals_total", slo_class="interactive", reason="prefill") == 1
    assert scene.value("baton_requests_total", outcome="rejected") == 1
    assert scene.value("baton_requests_total", outcome="overloaded") == 0
    assert (scene.router.num_finished, scene.router.num_rejected, scene.router.num_failed) == (1, 1, 0)
    assert scene.value("baton_prompt_tokens_total") == prompt_tokens  # of those that were let in
    assert scene.value("baton_request_prompt_tokens_count") == 1


async def test_all_sequences_of_a_refused_request_are_rejected(scene: Scene) -> None:
    async with await scene.start() as http:
        with await scene.admission.admit(scene.record()):
            scene.chooser.ttft_ms = 4000.0
            body = {**COMPLETION, "n": 3}
            assert (await http.post("/v1/completions", json=body, headers=INTERACTIVELY)).status_code == 429
    assert scene.value("baton_requests_total", outcome="rejected") == scene.router.num_rejected >= 1
    assert scene.router.num_failed == 0


async def test_the_timeline_shows_the_admission_wait(scene: Scene) -> None:
    async with await scene.start() as http:
        placement = await scene.admission.admit(record := scene.record())
        scene.chooser.ttft_ms = 4000.0

        def make_room() -> None:
            placement.release()
            scene.chooser.ttft_ms = 20.0
            scene.admission.ended(record)

        asyncio.get_running_loop().call_later(0.05, make_room)
        response = await http.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 200
    timeline = scene.timelines.find(response.json()["id"])
    stages = {stage["name"]: stage["duration_ms"] for stage in timeline["stages"]}
    assert stages["admission_queue"] > 0
    assert sum(stages.values()) == pytest.approx(timeline["total_ms"], abs=0.05)
    assert timeline["attributes"]["admission_wait_ms"] > 0
    assert timeline["attributes"]["admission_waited_for"] == "prefill"
    assert scene.value("baton_admission_wait_seconds_count", slo_class="standard") == 1
    assert scene.value("baton_admission_queued", slo_class="standard") == 0


async def test_no_admission_slot_leaks(scene: Scene) -> None:
    async with await scene.start() as http:
        for _ in range(40):  # workers fail now and then; other attempts follow
            await http.post("/v1/completions", json=COMPLETION)
    assert scene.admission.num_in_progress == 0
    assert all(worker.in_flight == 0 for worker in scene.cluster.registry.workers)
