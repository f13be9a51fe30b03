"""A worker whose model is divided: rank 0 leads, and what the worker does is what one process does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from baton.core.kv_spec import KVEncoding
from baton.core.request import SamplingParams
from baton.engine.draft.loading import LoadedDraft
from baton.engine.models.model_loader import relative_distance
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.step.overlap import AheadRule, always, never
from cluster.config.worker_config import SpeculationConfig
from decode_worker.speculation.registry import create_controller
from tests.drafting import engine_over, prompts, requests_for
from tests.drafting import run as run_requests
from tests.engine_runs import BLOCK_SIZE, build_engine, greedy, run, tokens_of
from tests.integration.worker_pair import Runners, pair_config, worker_pair
from tests.ranked_models import (
    NUM_TOKENS,
    PROMPTS,
    Build,
    build_with_draft,
    divisible_model,
    many_ways,
    ranked,
    sampled,
    save,
)

TEXTS = prompts(7, 12, 3, 18, 9, 26, 5, 14, 11, 21, 6, 16, 8, 30, 4, 10)
LAYERS = range(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(divisible_model("llama"), tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def whole(folder: str) -> ModelRunner:
    return build_with_draft(Build(folder), None)[0]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough(covered_by="[2]"))])
def divided(request: pytest.FixtureRequest, folder: str) -> Iterator[ModelRunner]:
    with ranked(Build(folder), request.param) as (runner, _, _):
        yield runner


def test_sixteen_requests_get_the_tokens_of_one_process(whole: ModelRunner, divided: ModelRunner) -> None:
    assert many_ways(divided) == many_ways(whole)


def test_steps_that_are_launched_ahead_get_their_tokens(whole: ModelRunner, divided: ModelRunner) -> None:
    params = sampled(len(PROMPTS))
    ahead = build_engine(divided, runs_ahead=always)
    assert tokens_of(run(ahead, PROMPTS, params)) == tokens_of(run(build_engine(whole), PROMPTS, params))


@pytest.mark.parametrize("runs_ahead", [never, always])
def test_log_probabilities_of_prompts_are_those_of_one_process(
    whole: ModelRunner, divided: ModelRunner, runs_ahead: AheadRule
) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=3)
    for own, other in zip(
        run(build_engine(whole), PROMPTS, params),
        run(build_engine(divided, chunk_tokens=7, runs_ahead=runs_ahead), PROMPTS, params),
        strict=True,
    ):
        mine, theirs = own.outputs[0].prompt_logprobs, other.outputs[0].prompt_logprobs
        assert mine is not None
        assert theirs is not None
        np.testing.assert_allclose(theirs.logprobs, mine.logprobs, atol=1e-4)
        np.testing.assert_allclose(theirs.top_logprobs, mine.top_logprobs, atol=1e-4)


def exported(runner: ModelRunner, encoding: KVEncoding = KVEncoding.NATIVE) -> bytes:
    """The KV of the longest prompt, in its blocks."""
    engine = build_engine(runner, chunk_tokens=2048, prefix_caching=False)
    run(engine, PROMPTS[-1:], greedy(1))
    blocks = list(range(-(-len(PROMPTS[-1]) // BLOCK_SIZE)))
    return bytes(runner.cache.export_bytes(blocks, 0, len(PROMPTS[-1]), LAYERS, encoding=encoding))


def test_kv_has_the_bytes_of_one_process(whole: ModelRunner, divided: ModelRunner) -> None:
    """As many, in the same order; the numbers differ by the rounding of sums."""
    own, other = exported(whole), exported(divided)
    assert len(own) == len(other) == len(PROMPTS[-1]) * whole.spec.bytes_per_token
    numbers = [torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (own, other)]
    assert relative_distance(numbers[1], numbers[0]) < 1e-5


@pytest.mark.parametrize("encoding", KVEncoding)
def test_ranks_pass_on_the_bytes_of_one_process(whole: ModelRunner, divided: ModelRunner, encoding: KVEncoding) -> None:
    data, count = exported(whole, encoding), len(PROMPTS[-1])
    blocks = list(range(100, 100 + -(-count // BLOCK_SIZE)))
    divided.cache.import_bytes(blocks, 0, count, LAYERS, memoryview(data), encoding)
    again = bytes(divided.cache.export_bytes(blocks, 0, count, LAYERS, encoding=encoding))
    if encoding is KVEncoding.NATIVE:
        assert again == data
    else:  # scales are encoded once more
        assert len(again) == len(data)


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
@pytest.mark.parametrize("sender", ["divided", "whole"])
async def test_hand_offs_between_one_rank_and_several(
    whole: ModelRunner, divided: ModelRunner, sender: str, shared_memory: str
) -> None:
    expected = tokens_of(run(build_engine(whole), PROMPTS, greedy(NUM_TOKENS)))
    runners = Runners(divided, whole) if sender == "divided" else Runners(whole, divided)
    config = pair_config(kv_transfer={"shared_memory": shared_memory}, speculation={"method": "none"})
    async with worker_pair(runners, config) as pair:
        assert await pair.generate_all(PROMPTS, greedy(NUM_TOKENS)) == expected
        answer = await pair.generate(list(reversed(PROMPTS[-1])), greedy(NUM_TOKENS))
        assert answer.handoff is not None
        assert answer.handoff.num_bytes == len(PROMPTS[-1]) * whole.spec.bytes_per_token
        await pair.settle()


async def test_int8_hand_offs_give_what_one_rank_gives(whole: ModelRunner, divided: ModelRunner) -> None:
    config = pair_config(kv_transfer={"encoding": "int8"}, speculation={"method": "none"})
    found = []
    for decode in (whole, divided):
        runners = Runners(whole, divided) if decode is divided else Runners(divided, whole)
        async with worker_pair(runners, config) as pair:
            answers = [await pair.generate(prompt, greedy(NUM_TOKENS)) for prompt in PROMPTS[4:8]]
            assert all(answer.handoff is not None and answer.handoff.num_bytes for answer in answers)
            found.append([answer.token_ids for answer in answers])
    assert found[0] == found[1]


def speculating(runner: ModelRunner, draft: LoadedDraft | None, method: str) -> list[list[int]]:
    limits = SpeculationConfig(max_draft_tokens=4, max_tree_tokens=8, tree_max_batch=4)
    controller = create_controller(limits, runner, draft, default=method)
    engine = engine_over(runner, controller)
    found = run_requests(engine, requests_for(TEXTS))
    assert controller.num_failures == 0
    assert controller.figures.by_method[method].num_drafts
    return found


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead"])
def test_methods_without_a_network(whole: ModelRunner, divided: ModelRunner, method: str) -> None:
    assert speculating(divided, None, method) == speculating(whole, None, method)
