"""Greedy tokens through a prefill and a decode worker equal ``transformers.generate``, for every kind of KV layout."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.architectures import architecture_param
from tests.engine_runs import BLOCK_SIZE, greedy
from tests.integration.worker_pair import Runners, pair_config, worker_pair
from tests.tiny_models import CONFIGS, model_with_reference, random_prompts

NUM_TOKENS = 12
PROMPTS = random_prompts((1, 2, 3, 4, 5, 8, 9, 16, 17, 23, 31, 33, 40, 47, 55, 64))


@dataclass(frozen=True, slots=True)
class Case:
    runners: Runners
    expected: list[list[int]]


EVERY_KIND = [architecture_param(name) for name in sorted(CONFIGS)]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    model, expected = model_with_reference(request.param, PROMPTS, NUM_TOKENS)
    return Case(Runners.of(model), expected)


@pytest.mark.parametrize("case", EVERY_KIND, indirect=True)
@pytest.mark.parametrize(
    "chunk_tokens", [16, *(pytest.param(n, marks=pytest.mark.thorough(covered_by="[16-")) for n in (64, 2048))]
)
async def test_tokens_match_transformers_with_prefix_hits(case: Case, chunk_tokens: int) -> None:
    config = pair_config(prefill={"chunk_tokens": chunk_tokens}, decode={"chunk_tokens": chunk_tokens})
    spec = case.runners.decode.spec
    async with worker_pair(case.runners, config) as pair:
        for index in (0, len(PROMPTS) // 2, -1):
            answer = await pair.generate(PROMPTS[index], greedy(NUM_TOKENS))
            assert answer.token_ids == case.expected[index]
            assert answer.handoff is not None
            assert answer.handoff.num_bytes == len(PROMPTS[index]) * spec.bytes_per_token

        assert await pair.generate_all(PROMPTS, greedy(NUM_TOKENS)) == case.expected

        hits = await pair.generate(PROMPTS[-1], greedy(NUM_TOKENS))
        assert hits.token_ids == case.expected[-1]
        assert hits.num_cached_tokens == (len(PROMPTS[-1]) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert hits.handoff is not None
        assert (hits.handoff.num_bytes, hits.handoff.num_cached_tokens) == (0, len(PROMPTS[-1]))
        await pair.settle()


@pytest.mark.parametrize("case", EVERY_KIND, indirect=True)
async def test_tokens_match_transformers_without_prefix_caching(case: Case) -> None:
    config = pair_config(engine={"prefix_caching": False}, prefill={"chunk_tokens": 2048})
    async with worker_pair(case.runners, config) as pair:
        assert await pair.generate_all([*PROMPTS, *PROMPTS[-2:]], greedy(NUM_TOKENS)) == [
            *case.expected,
            *case.expected[-2:],
        ]
        assert (await pair.decode.client.stats()).kv_blocks_cached == 0
        await pair.settle()
