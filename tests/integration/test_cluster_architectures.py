"""Everything but Ray and HTTP: router, both workers and gRPC, on tiny models of the kinds that users bring."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from baton.core.timeline import Timeline
from cluster.dispatch.router import Router
from cluster.latency.latency_model import LatencyModel
from cluster.registry.workers import WorkerInfo, WorkerRegistry
from cluster.requests.generation import GenerationRequest, ModelCard
from cluster.routing.dispatcher import Dispatcher
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_config import RoutingConfig
from cluster.routing.routing_profile import build_profile
from cluster.telemetry.metrics import RouterMetrics
from tests.architectures import architecture_param
from tests.credentials import CREDENTIALS, connect
from tests.engine_runs import greedy
from tests.integration.worker_pair import HostedWorker, Runners, worker_pair
from tests.routers import admission_off, make_router
from tests.tiny_models import model_with_reference, random_prompts
from tests.waiting import until

NUM_TOKENS = 16
PROMPTS = random_prompts((1, 5, 16, 17, 33, 48, 60, 64))
ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma3_multimodal",
    "phi3",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "mixtral",
)


def info_of(worker: HostedWorker, pool: str) -> WorkerInfo:
    loaded, spec = worker.engine.runner.loaded, worker.engine.runner.spec
    return WorkerInfo(
        worker_id=f"{pool}-1",
        pool=pool,
        address=worker.address,
        peer_proof=CREDENTIALS.secret.peer_proof(worker.address),
        node="here",
        pid=0,
        device="cpu",
        model_name="tiny",
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=(),
        kv_fingerprint=spec.fingerprint(),
        kv_bytes_per_token=spec.bytes_per_token,
        draft_method="",
        block_size=spec.block_size,
        dtype=spec.dtype,
    )


def router_without_local_prefill(model: ModelCard, registry: WorkerRegistry, metrics: RouterMetrics) -> Router:
    """Otherwise the decode worker would compute all such short prompts."""
    predictions = RequestPredictions(LatencyModel(), metrics.prediction_errors)
    chooser = build_profile(RoutingConfig(local_prefill="never"), predictions.forecaster)
    admission = admission_off(Dispatcher(registry, predictions, chooser), registry, metrics, worker_wait_s=5.0)
    return make_router(model, registry, metrics, predictions, admission)


@pytest.mark.parametrize("architecture", [architecture_param(name) for name in ARCHITECTURES])
async def test_greedy_tokens_match_transformers(architecture: str) -> None:
    model, expected = model_with_reference(architecture, PROMPTS, NUM_TOKENS)
    async with worker_pair(Runners.of(model)) as pair:
        registry, metrics = WorkerRegistry(connect), RouterMetrics()
        registry.add(info_of(pair.prefill, "prefill"))
        registry.add(info_of(pair.decode, "decode"))
        loaded = pair.decode.engine.runner.loaded
        card = ModelCard("tiny", loaded.max_model_len, loaded.vocab_size, created_unix_s=0)
        router = router_without_local_prefill(card, registry, metrics)

        async def generate(index: int, name: str) -> list[int]:
            request_id = f"{name}-{index}"
            request = GenerationRequest(request_id, tuple(PROMPTS[index]), greedy(NUM_TOKENS), Timeline(request_id))
            async with aclosing(router.generate(request)) as chunks:
                return [token async for chunk in chunks for token in chunk.token_ids]

        together = await asyncio.gather(*(generate(index, "together") for index in range(len(PROMPTS))))
        assert together == expected
        alone = [await generate(index, "alone") for index in range(len(PROMPTS))]
        assert alone == expected
        # A worker is at work for the router until the hand-off is booked, which may be behind the tokens.
        await until(lambda: all(worker.in_flight == 0 for worker in registry.workers))
        assert metrics.transfers.labels("ok")._value.get() == 2 * len(PROMPTS)
        await pair.settle()
        for worker in registry.workers:
            await registry.remove(worker.info.worker_id)
