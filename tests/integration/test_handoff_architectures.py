"""Greedy tokens through a prefill and a decode worker equal ``transformers.generate``, for every kind of KV layout."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.engine_runs import BLOCK_SIZE, greedy
from tests.integration.worker_pair import Runners, pair_config, worker_pair
from tests.tiny_models import CONFIGS, model_with_reference, random_prompts

NUM_TOKENS = 12
PROMPTS = random_prompts((1, 2, 3, 4, 5, 8, 9, 16, 17, 23, 31, 33, 40, 47, 55, 64))
FEW = PROMPTS[::5]


@dataclass(frozen=True, slots=True)
class Case:
    runners: Runners
    prompts: list[list[int]]
    expected: list[list[int]]


# Those whose KV differs in kind: shared heads or not, one, windows, sinks, latent, keys and values of different sizes.
KINDS = {"llama", "gpt2", "gpt_bigcode", "gemma2", "gpt_oss", "deepseek_v3", "mimo_v2_flash", "qwen2_window"}
EVERY = sorted(CONFIGS)
EVERY_KIND = [name if name in KINDS else pytest.param(name, marks=pytest.mark.thorough) for name in EVERY]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, thorough: bool) -> Case:
    """Those whose KV is of another's kind hand over a few prompts."""
    prompts = PROMPTS if thorough or request.param in KINDS else FEW
    model, expected = model_with_reference(request.param, prompts, NUM_TOKENS)
    return Case(Runners.of(model), prompts, expected)


def test_every_kind_is_the_name_of_a_model() -> None:
    assert CONFIGS.keys() >= KINDS


@pytest.mark.parametrize("case", EVERY, indirect=True)
@pytest.mark.parametrize(
    "chunk_tokens", [16, pytest.param(64, marks=pytest.mark.thorough), pytest.param(2048, marks=pytest.mark.thorough)]
)
async def test_with_prefix_hits(case: Case, chunk_tokens: int) -> None:
    config = pair_config(prefill={"chunk_tokens": chunk_tokens}, decode={"chunk_tokens": chunk_tokens})
    spec = case.runners.decode.spec
    async with worker_pair(case.runners, config) as pair:
        prompts = case.prompts
        for index in (0, len(prompts) // 2, -1):
            answer = await pair.generate(prompts[index], greedy(NUM_TOKENS))
            assert answer.token_ids == case.expected[index]
            assert answer.handoff is not None
            assert answer.handoff.num_bytes == len(prompts[index]) * spec.bytes_per_token

        assert await pair.generate_all(prompts, greedy(NUM_TOKENS)) == case.expected

        hits = await pair.generate(prompts[-1], greedy(NUM_TOKENS))
        assert hits.token_ids == case.expected[-1]
        assert hits.num_cached_tokens == (len(prompts[-1]) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert hits.handoff is not None
        assert (hits.handoff.num_bytes, hits.handoff.num_cached_tokens) == (0, len(prompts[-1]))
        await pair.settle()


@pytest.mark.parametrize("case", EVERY_KIND, indirect=True)
async def test_without_prefix_hits(case: Case) -> None:
    config = pair_config(engine={"prefix_caching": False}, prefill={"chunk_tokens": 2048})
    async with worker_pair(case.runners, config) as pair:
        assert await pair.generate_all([*case.prompts, *case.prompts[-2:]], greedy(NUM_TOKENS)) == [
            *case.expected,
            *case.expected[-2:],
        ]
        assert (await pair.decode.client.stats()).kv_blocks_cached == 0
        await pair.settle()
