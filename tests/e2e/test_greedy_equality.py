"""Greedy tokens through the whole cluster equal ``transformers.generate``, whatever the chunk size, load and cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams
from baton.engine.async_engine import AsyncEngine
from baton.engine.async_engine import generate_all as generate_all_tokens
from baton.engine.models.default_model import ensure_default_model
from baton.engine.models.model_loader import load_model
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.step.overlap import always
from tests.e2e.conftest import running_cluster
from tests.e2e.varied_prompts import varied_prompts
from tests.running_cluster import MODEL, RunningCluster

NUM_NEW_TOKENS = 8


@pytest.fixture(scope="module")
def prompts(thorough: bool) -> list[list[int]]:
    """Prompts of every length and kind: all fifty in thorough runs, otherwise every third."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_default_model())
    return [tokenizer(text).input_ids for text in varied_prompts()[:: 1 if thorough else 3]]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates by itself, one prompt after the other, in float32."""
    model = AutoModelForCausalLM.from_pretrained(ensure_default_model(), dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


OTHER_TRANSPORTS = {16: "grpc", 2048: "nixl"}
"""Transports between workers without shared memory, by chunk size."""


@pytest.fixture(
    scope="module",
    params=[
        (16, False),  # the burst has long chunks, caches and shared memory
        *(
            pytest.param(each, marks=pytest.mark.thorough(covered_by="[chunk16-cacheFalse]"))
            for each in ((16, True), (64, True), (2048, True), (2048, False))
        ),
    ],
    ids=lambda p: f"chunk{p[0]}-cache{p[1]}",
)
def cluster_of(request: pytest.FixtureRequest) -> Iterator[tuple[RunningCluster, bool, bool]]:
    """Has it caches; do decode workers read KV from memory of prefill workers."""
    chunk_tokens, prefix_caching = request.param
    transport = "grpc" if prefix_caching else OTHER_TRANSPORTS[chunk_tokens]
    settings = {
        "dtype": "float32",
        "engine": {"prefix_caching": prefix_caching},
        "kv_transfer": {"shared_memory": "auto" if prefix_caching else "off", "transport": transport},
        "prefill": {"chunk_tokens": chunk_tokens},
        "decode": {"chunk_tokens": chunk_tokens},
    }
    with running_cluster(settings) as cluster:
        yield cluster, prefix_caching, prefix_caching or transport == "nixl"


def generate_all(cluster: RunningCluster, prompts: list[list[int]], concurrency: int) -> tuple[list[list[int]], int]:
    """Token ids of every prompt, and how many prompt tokens came from a cache."""

    def one(prompt: list[int]) -> tuple[list[int], int]:
        body = cluster.complete(prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        return body["choices"][0]["token_ids"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(concurrency) as pool:
        results = list(pool.map(one, prompts))
    return [tokens for tokens, _ in results], sum(cached for _, cached in results)


@pytest.mark.parametrize(
    "chunk_tokens",
    [64, *(pytest.param(n, marks=pytest.mark.thorough(covered_by="[64]")) for n in (16, 2048))],
)
async def test_tokens_match_a_single_engine(
    chunk_tokens: int, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """One engine that prefills and decodes, without hand-off: a fixed point to compare the cluster with."""
    source = resolve_model("smollm2-135m-instruct")
    runner = ModelRunner(load_model(source, "float32", torch.device("cpu")), num_blocks=2048, block_size=16)
    # As on a GPU, where a step is launched before the tokens of the one before it are read.
    engine = AsyncEngine(runner, SchedulerLimits(chunk_tokens, max_num_seqs=16, max_model_len=2048), runs_ahead=always)
    engine.start()
    params = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True)
    requests = [Request(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    try:
        assert await asyncio.gather(*(generate_all_tokens(engine, request) for request in requests)) == expected
    finally:
        await engine.stop()


def test_a_burst_is_served_completely_with_the_default_configuration(
    prompts: list[list[int]], expected: list[list[int]], thorough: bool
) -> None:
    """60 or 200 simultaneous requests of the default class are all served, with hand-offs or without, as the router
    decides."""
    num_prompts, times = (50, 4) if thorough else (10, 6)  # the first ones are short

    async def one(http: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW_TOKENS, "temperature": 0}
        answer = await http.post("/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    async def burst(endpoint: str) -> list[list[int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=endpoint, timeout=300, limits=limits) as http:
            return await asyncio.gather(*(one(http, prompt) for prompt in prompts[:num_prompts] * times))

    with running_cluster({"dtype": "float32", "routing": {}}) as cluster:
        alone, _ = generate_all(cluster, prompts[:1], concurrency=1)
        assert alone == expected[:1]
        assert asyncio.run(burst(cluster.endpoint)) == expected[:num_prompts] * times
        cluster.assert_nothing_leaked()
        num_local, num_handed_over = (
            cluster.metric(f"baton_{name}_total") for name in ("local_prefills", "kv_transfers")
        )
        assert num_local + num_handed_over >= 1 + num_prompts * times
        assert cluster.metric("baton_admission_refusals_total") == 0


def moved_bytes(cluster: RunningCluster) -> tuple[float, float]:
    """Bytes of all hand-offs so far, and the part of them read from memory of prefill workers."""
    cluster.assert_nothing_leaked()
    return (
        cluster.metric("baton_kv_transfer_bytes_total"),
        cluster.metric("baton_kv_transfer_shared_bytes_total"),
    )


def test_tokens_match_transformers(
    cluster_of: tuple[RunningCluster, bool, bool], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    cluster, prefix_caching, reads_memory = cluster_of
    together, _ = generate_all(cluster, prompts, concurrency=16)
    assert together == expected
    moved_before = moved_bytes(cluster)
    alone, num_cached = generate_all(cluster, prompts, concurrency=1)
    assert alone == expected
    # The second time every prompt is known, so that with a cache the hand-off, too, moves only what is missing.
    full_blocks = sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)
    assert num_cached == (full_blocks if prefix_caching else 0)
    assert cluster.metric("baton_kv_transfers_total") > 0
    # Where the prefill worker's memory may be read, a hand-off that has it alone goes that way.
    moved, shared = (after - before for before, after in zip(moved_before, moved_bytes(cluster), strict=True))
    assert moved > 0
    assert shared == (moved if reads_memory else 0)
