"""Hand-offs as int8 through both workers: the tokens of KV that was rounded once, drafts' KV included."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.core.chunk_budget import SchedulerLimits
from baton.core.kv_spec import KVCacheSpec, KVEncoding
from baton.core.request import Request
from baton.engine.async_engine import AsyncEngine, generate_all
from baton.engine.runner.model_runner import ModelRunner
from tests.engine_runs import greedy
from tests.integration.test_handoff_drafts import PARAMS, eagle, prompts, settings
from tests.integration.worker_pair import Runners, pair_config, worker_pair
from tests.observers import CallOn
from tests.tiny_drafts import tiny_target
from tests.tiny_models import random_prompts, tiny_model

PROMPTS = random_prompts((3, 9, 17, 30, 41))
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def runners() -> Runners:
    return Runners.of(tiny_model("llama"))


def int8_bytes(spec: KVCacheSpec, num_tokens: int) -> int:
    return num_tokens * spec.layer_bytes_per_token(0, len(spec.all_layers), KVEncoding.INT8)


async def with_rounded_prompt(runner: ModelRunner, prompt: list[int]) -> list[int]:
    """Tokens of one engine that does everything, behind a prompt whose KV is made what int8 makes of it."""
    limits = SchedulerLimits(64, 16, runner.loaded.max_model_len)
    engine = AsyncEngine(runner, limits, prefix_caching=False, num_threads=1)
    request = Request("request", list(prompt), greedy(NUM_TOKENS))

    def round_prompt(plan: object) -> None:
        if request.num_computed_tokens == len(prompt):
            runner.cache.pass_through(request.block_ids, len(prompt), KVEncoding.INT8)

    engine.subscribe(CallOn(computed=round_prompt))
    engine.start()
    try:
        return await generate_all(engine, request)
    finally:
        await engine.stop()


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
async def test_tokens_match_a_prompt_that_was_rounded_once(runners: Runners, shared_memory: str) -> None:
    expected = [await with_rounded_prompt(runners.decode, prompt) for prompt in PROMPTS]
    config = pair_config(
        kv_transfer={"encoding": "int8", "shared_memory": shared_memory}, speculation={"draft": "none"}
    )
    async with worker_pair(runners, config) as pair:
        answers = await asyncio.gather(*(pair.generate(prompt, greedy(NUM_TOKENS)) for prompt in PROMPTS))
        assert [answer.token_ids for answer in answers] == expected
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.handoff is not None
            assert answer.handoff.num_bytes == int8_bytes(runners.decode.spec, len(prompt))
            whole = answer.handoff.num_bytes + answer.handoff.num_spared_bytes
            assert whole == len(prompt) * runners.decode.spec.bytes_per_token
        await pair.settle()


async def test_a_rounded_prefix_is_reused_without_another_transfer(runners: Runners) -> None:
    prompt = random_prompts((40,))[0]
    async with worker_pair(runners, pair_config(kv_transfer={"encoding": "int8"})) as pair:
        first = await pair.generate(prompt, greedy(NUM_TOKENS))
        second = await pair.generate(prompt, greedy(NUM_TOKENS))
        assert second.token_ids == first.token_ids
        assert second.handoff is not None
        assert second.handoff.num_cached_tokens == 40
        assert second.handoff.num_bytes == second.handoff.num_spared_bytes == 0
        await pair.settle()


async def test_kv_of_drafts_is_also_sent_as_int8(tmp_path: Path) -> None:
    make_draft = eagle("eagle3", tmp_path)
    runners = Runners.with_drafts(tiny_target(), make_draft, make_draft)
    spec = runners.prefill.spec
    assert spec.draft_layers
    config = pair_config(speculation=settings("eagle3"), kv_transfer={"encoding": "int8"})
    async with worker_pair(runners, config) as pair:
        for prompt in prompts():
            answer = await pair.generate(prompt, PARAMS)
            assert len(answer.token_ids) == PARAMS.max_tokens
            assert answer.handoff is not None
            assert answer.handoff.num_bytes == int8_bytes(spec, len(prompt))
        await pair.settle()
