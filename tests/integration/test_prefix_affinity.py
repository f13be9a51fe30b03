"""The router's view of the prefix caches equals the prefixes that the workers then find."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.core.request import SamplingParams
from cluster.prefix_index.prefix_feed import PrefixFeed
from cluster.prefix_index.prefix_index import PrefixIndex
from cluster.registry.workers import WorkerInfo, WorkerRegistry
from decode_worker import role
from tests.credentials import CREDENTIALS, connect
from tests.engine_runs import BLOCK_SIZE
from tests.integration.worker_pair import HostedWorker, Runners, WorkerPair, pair_config, worker_pair
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.waiting import until
from tests.worker_infos import make_info

NUM_BLOCKS = 48  # few, so that blocks are evicted
IDS = ("prefill-1", "decode-1")
PARAMS = SamplingParams(max_tokens=5, temperature=0)


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "DECODE_PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def runners() -> Runners:
    return Runners.of(tiny_model("llama"), NUM_BLOCKS)


def info_of(worker: HostedWorker, worker_id: str) -> WorkerInfo:
    pool = worker_id.split("-")[0]
    return make_info(worker_id, pool, worker.address, block_size=BLOCK_SIZE, kv_blocks=NUM_BLOCKS)


@asynccontextmanager
async def listening(pair: WorkerPair) -> AsyncIterator[PrefixIndex]:
    """The router's side."""
    registry, index = WorkerRegistry(connect), PrefixIndex(BLOCK_SIZE, hash_key=CREDENTIALS.secret.block_hash_key)
    feed = PrefixFeed(index)
    for worker_id, worker in zip(IDS, (pair.prefill, pair.decode), strict=True):
        feed.add(registry.add(info_of(worker, worker_id)))
    try:
        await until(lambda: len(index.sizes()) == 2)
        yield index
    finally:
        await feed.close()
        for worker_id in IDS:
            await registry.remove(worker_id)


async def content(worker: HostedWorker) -> set[bytes]:
    engine = worker.engine
    return await engine.call(lambda: set(engine.blocks.prefix_cache._entries))


async def caught_up(pair: WorkerPair, index: PrefixIndex) -> None:
    """Waits until the events are here; fails when they never say what the caches hold."""
    await pair.settle()
    for worker_id, worker in zip(IDS, (pair.prefill, pair.decode), strict=True):
        truth = await content(worker)
        await until(lambda truth=truth, worker_id=worker_id: index._caches[worker_id].hashes == truth)


def prompts(count: int) -> list[tuple[int, ...]]:
    """Some begin like others, some are new."""
    rng = random.Random(5)
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        base = rng.choice(made) if made and rng.random() < 0.7 else ()
        kept = base[: rng.randint(0, len(base))]
        made.append((*kept, *(rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 40))))[:60])
    return made


async def test_cached_tokens_on_the_worker_match_the_prefix_index(runners: Runners) -> None:
    hits = evicted = 0
    async with worker_pair(runners) as pair, listening(pair) as index:
        before: set[bytes] = set()
        for prompt in prompts(40):
            believed = index.cached_tokens(IDS, prompt)
            answer = await pair.generate(prompt, PARAMS)
            assert answer.num_cached_tokens == believed["prefill-1"]
            assert answer.handoff is not None
            # A hand-off may leave nothing to compute, so that a decode worker can use one block more than counted.
            num_cached, at_most = answer.handoff.num_cached_tokens, believed["decode-1"] + BLOCK_SIZE
            assert num_cached == believed["decode-1"] or (num_cached == at_most == len(prompt))
            await caught_up(pair, index)
            hits += believed["prefill-1"] > 0
            evicted += len(before - await content(pair.prefill))
            before = await content(pair.prefill)
    assert hits > 10
    assert evicted > 10


async def test_a_router_that_starts_later_has_the_same_index(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        async with listening(pair) as first:
            for prompt in prompts(6):
                await pair.generate(prompt, PARAMS)
            await caught_up(pair, first)
            async with listening(pair) as second:
                await caught_up(pair, second)
                assert second.sizes() == first.sizes()
                assert min(first.sizes().values()) > 0
        await until(lambda: not pair.prefill.engine.blocks.prefix_cache.events._readers)


async def test_without_prefix_caching_no_cache_events_are_sent(runners: Runners) -> None:
    config = pair_config(engine={"prefix_caching": False})
    async with worker_pair(runners, config) as pair, listening(pair) as index:
        prompt = prompts(1)[0] * 3
        for _ in range(2):
            answer = await pair.generate(prompt, PARAMS)
            assert answer.num_cached_tokens == 0
        await caught_up(pair, index)
        assert index.cached_tokens(IDS, prompt) == dict.fromkeys(IDS, 0)
        assert index.sizes() == dict.fromkeys(IDS, 0)


async def test_a_worker_stops_while_a_router_watches_its_cache(runners: Runners) -> None:
    async with worker_pair(runners) as pair, listening(pair) as index:
        await pair.generate(prompts(1)[0], PARAMS)
        await pair.prefill.server.stop(grace=0)
        await until(lambda: "prefill-1" not in index.sizes())
        assert "decode-1" in index.sizes()
