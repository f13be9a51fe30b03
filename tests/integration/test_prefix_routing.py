"""The real router over real workers routes to cached prefixes and knows their exact length."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from baton.core.request import SamplingParams
from baton.core.timeline import Event, Timeline
from cluster.latency.latency_model import LatencyModel
from cluster.prefix_index.prefix_feed import PrefixFeed
from cluster.prefix_index.prefix_index import PrefixIndex
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import GenerationRequest, ModelCard
from cluster.routing.dispatcher import Dispatcher
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_config import DEFAULT_WEIGHTS, RoutingConfig
from cluster.routing.routing_profile import build_profile
from cluster.telemetry.metrics import RouterMetrics
from decode_worker import role
from tests.credentials import CREDENTIALS, connect
from tests.engine_runs import BLOCK_SIZE
from tests.integration.worker_pair import HostedWorker, Runners, worker_pair
from tests.routers import admission_off, make_router
from tests.tiny_models import MAX_POSITIONS, VOCAB_SIZE, random_prompts, tiny_model
from tests.waiting import TIMEOUT_S, until
from tests.worker_infos import make_info

NUM_BLOCKS = 128


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "DECODE_PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def runners() -> list[Runners]:
    model = tiny_model("llama")
    return [Runners.of(model, NUM_BLOCKS) for _ in range(2)]


class AffinityRouter:
    """The router's process, without HTTP; only prefixes count."""

    def __init__(self, workers: dict[str, HostedWorker], local_prefill: str) -> None:
        self.workers = workers
        self.registry, self.index, metrics = (
            WorkerRegistry(connect),
            PrefixIndex(BLOCK_SIZE, hash_key=CREDENTIALS.secret.block_hash_key),
            RouterMetrics(),
        )
        self.feed = PrefixFeed(self.index, metrics.prefixes)
        config = RoutingConfig.model_validate(
            {
                "scorers": {name: float(name == "prefix_affinity") for name in DEFAULT_WEIGHTS},
                "local_prefill": local_prefill,
            }
        )
        predictions = RequestPredictions(LatencyModel(), metrics.prediction_errors)
        chooser = build_profile(config, predictions.forecaster)
        dispatcher = Dispatcher(self.registry, predictions, chooser, self.index)
        admission = admission_off(dispatcher, self.registry, metrics, TIMEOUT_S)
        card = ModelCard("tiny", MAX_POSITIONS, VOCAB_SIZE, 0)
        self.router = make_router(card, self.registry, metrics, predictions, admission)
        self._ids = itertools.count()

    async def start(self) -> None:
        for worker_id, worker in self.workers.items():
            pool = worker_id.split("-")[0]
            info = make_info(worker_id, pool, worker.address, block_size=BLOCK_SIZE, kv_blocks=NUM_BLOCKS)
            self.feed.add(self.registry.add(info))
        await until(lambda: len(self.index.sizes()) == len(self.workers))

    async def stop(self) -> None:
        await self.feed.close()
        for worker_id in self.workers:
            await self.registry.remove(worker_id)

    async def ask(self, prompt: Sequence[int]) -> tuple[str, int, int]:
        """The worker that computed the prompt, how much of it that was believed to hold, and how much it held."""
        timeline = Timeline(f"request-{next(self._ids)}")
        timeline.record(Event.RECEIVED)
        params = SamplingParams(max_tokens=4, temperature=0)
        request = GenerationRequest(timeline.request_id, tuple(prompt), params, timeline)
        async with asyncio.timeout(TIMEOUT_S), aclosing(self.router.generate(request)) as chunks:
            found = [chunk.num_cached_tokens async for chunk in chunks]
        candidates = timeline.to_dict()["routing"]["candidates"]
        (chosen,) = (candidate for candidate in candidates if candidate["chosen"])
        return chosen["prefill"] or chosen["decode"], chosen["cached_tokens"], found[0]

    async def caught_up(self) -> None:
        """Waits for the last events."""
        for worker_id, worker in self.workers.items():
            engine = worker.engine
            truth = await engine.call(lambda engine=engine: set(engine.blocks.prefix_cache._entries))
            await until(lambda truth=truth, worker_id=worker_id: self.index._caches[worker_id].hashes == truth)


@asynccontextmanager
async def affinity_router(runners: Sequence[Runners], local_prefill: str = "never") -> AsyncIterator[AffinityRouter]:
    async with worker_pair(runners[0]) as one, worker_pair(runners[1]) as other:
        workers = {
            "prefill-1": one.prefill,
            "prefill-2": other.prefill,
            "decode-1": one.decode,
            "decode-2": other.decode,
        }
        router = AffinityRouter(workers, local_prefill)
        await router.start()
        try:
            yield router
            await one.settle()
            await other.settle()
        finally:
            await router.stop()


@pytest.mark.parametrize("local_prefill", ["never", "always"])
async def test_conversations_stay_on_their_worker(runners: list[Runners], local_prefill: str) -> None:
    turns = random_prompts((21, 17, 30, 25))
    async with affinity_router(runners, local_prefill) as router:
        places: dict[int, str] = {}
        for length in (9, 17, 20):
            for number, turn in enumerate(turns):
                prompt = [*turn, *(token % VOCAB_SIZE for token in range(2, 2 + length))]
                worker, believed, found = await router.ask(prompt)
                assert believed == found
                assert places.setdefault(number, worker) == worker
                assert found >= len(turn) // BLOCK_SIZE * BLOCK_SIZE or length == 9
                await router.caught_up()
        assert len(set(places.values())) == 2


async def test_a_burst_with_a_common_prefix_goes_to_one_worker(runners: list[Runners]) -> None:
    (beginning,) = random_prompts((40,))
    async with affinity_router(runners) as router:
        answers = await asyncio.gather(*(router.ask([*beginning, number]) for number in range(2, 12)))
        assert len({worker for worker, _, _ in answers}) == 1
        assert [believed for _, believed, _ in answers] == [0] + [40] * 9
        await router.caught_up()
        worker, believed, found = await router.ask([*beginning, 50])
        assert (worker, believed, found) == (answers[0][0], 40, 40)
