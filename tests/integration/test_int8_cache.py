"""An int8 cache through the engine and both workers: the only loss is the cache's own rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.kv_spec import KVEncoding
from tests.engine_runs import build_engine, build_runner, greedy, run_tokens
from tests.integration.test_handoff_drafts import PARAMS, eagle, prompts, settings
from tests.integration.worker_pair import Runners, pair_config, worker_pair
from tests.tiny_drafts import tiny_target
from tests.tiny_models import random_prompts, tiny_model

PROMPTS = random_prompts((3, 9, 17, 30, 41))
NUM_TOKENS = 16


@pytest.mark.parametrize("decoder", ["fused", "transformers"])
def test_preemption_and_prefix_hits_change_no_token(decoder: str) -> None:
    runner = build_runner(tiny_model("llama"), decoder=decoder, kv_cache="int8")
    alone = [run_tokens(build_engine(runner), [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]
    engine = build_engine(runner, chunk_tokens=16, num_blocks=18)
    assert run_tokens(engine, PROMPTS, NUM_TOKENS) == alone
    assert engine.scheduler.num_preemptions > 0
    assert run_tokens(engine, PROMPTS, NUM_TOKENS) == alone


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mistral"])
async def test_tokens_match_a_single_engine_with_an_int8_cache(name: str) -> None:
    """Half of the bytes are sent, and the transfer rounds nothing."""
    runner = build_runner(tiny_model(name), kv_cache="int8")
    expected = run_tokens(build_engine(runner), PROMPTS, NUM_TOKENS)
    runners = Runners.with_drafts(tiny_model(name), None, None, kv_cache="int8")
    spec = runners.decode.spec
    async with worker_pair(runners, pair_config(speculation={"draft": "none"})) as pair:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            answer = await pair.generate(prompt, greedy(NUM_TOKENS))
            assert answer.token_ids == tokens
            assert answer.handoff is not None
            assert answer.handoff.num_bytes == len(prompt) * spec.bytes_per_token
            assert answer.handoff.num_spared_bytes == 0
        await pair.settle()
    assert spec.bytes_per_token == spec.layer_bytes_per_token(0, len(spec.layers), KVEncoding.INT8)


async def test_drafts_change_no_token_and_keep_native_kv(tmp_path: Path) -> None:
    make_draft = eagle("eagle3", tmp_path)
    plain = Runners.with_drafts(tiny_target(), None, None, kv_cache="int8")
    async with worker_pair(plain, pair_config(speculation={"draft": "none"})) as pair:
        expected = [(await pair.generate(prompt, PARAMS)).token_ids for prompt in prompts()]
    runners = Runners.with_drafts(tiny_target(), make_draft, make_draft, kv_cache="int8")
    spec = runners.decode.spec
    assert [spec.kept_as(layer) for layer in range(len(spec.all_layers))][-1] is KVEncoding.NATIVE
    async with worker_pair(runners, pair_config(speculation=settings("eagle3"))) as pair:
        for prompt, tokens in zip(prompts(), expected, strict=True):
            answer = await pair.generate(prompt, PARAMS)
            assert answer.token_ids == tokens
            assert answer.handoff is not None
            assert answer.handoff.num_bytes == len(prompt) * spec.bytes_per_token
        await pair.settle()
