"""With any drafts, the output equals that of plain decoding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import Draft
from baton.core.request import FinishReason, Request, SamplingParams
from baton.engine.async_engine import AsyncEngine
from baton.engine.contracts import Proposer
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.scheduler import Scheduler
from decode_worker.speculation.controller import SpeculationController
from decode_worker.speculation.verification import SampleAndMatch
from tests.drafting import registered
from tests.engine_runs import Outcome, build_engine, build_runner, greedy, run
from tests.tiny_models import VOCAB_SIZE, random_prompts, tiny_model
from tests.toy_proposers import STYLES, Oracle

NUM_TOKENS = 20
PROMPTS = random_prompts((1, 4, 7, 12, 20, 33, 5, 9))
PARAMS = [
    greedy(NUM_TOKENS),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=1),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0, repetition_penalty=1.4, logprobs=0),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_k=30, presence_penalty=1.0, seed=2, logprobs=4),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.2, top_p=0.9, frequency_penalty=0.7, seed=3),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, stop_token_ids=tuple(range(3, 30)), min_tokens=5, seed=4),
    SamplingParams(max_tokens=1, temperature=0),
    SamplingParams(max_tokens=2, temperature=1.0, logit_bias=((9, 3.0),), seed=5, logprobs=1),
]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return build_runner(tiny_model("mistral"))


@pytest.fixture(scope="module")
def plain(runner: ModelRunner) -> list[Outcome]:
    return run(build_engine(runner), PROMPTS, PARAMS)


def speculating(
    runner: ModelRunner, proposer: Proposer, *, num_blocks: int | None = None, chunk_tokens: int = 64
) -> Engine:
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.fill_(torch.nan)
    limits = SchedulerLimits(chunk_tokens, 64, runner.loaded.max_model_len)
    blocks = BlockManager(num_blocks or runner.cache.num_blocks, runner.spec.block_size)
    return Engine(runner, Scheduler(limits, blocks), SampleAndMatch(), proposer)


def oracle_for(outcomes: Sequence[Outcome], style: str, shape: str = "chain") -> Oracle:
    return Oracle({f"request-{index}": outcome.token_ids for index, outcome in enumerate(outcomes)}, style, shape)


def assert_same(got: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    assert [outcome.token_ids for outcome in got] == [outcome.token_ids for outcome in expected]
    assert [outcome.finish_reason for outcome in got] == [outcome.finish_reason for outcome in expected]
    for mine, true in zip(got, expected, strict=True):
        ours, theirs = _logprobs(mine), _logprobs(true)
        assert [[token for token, _ in top] for _, top in ours] == [[token for token, _ in top] for _, top in theirs]
        assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)


def _logprobs(outcome: Outcome) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    for output in outcome.outputs:
        assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
    return [(entry.logprob, entry.top) for output in outcome.outputs for entry in output.logprobs or ()]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("chunk_tokens", [4, 64])
@pytest.mark.parametrize("style", STYLES)
def test_any_drafts_give_the_tokens_of_plain_decoding(
    runner: ModelRunner, plain: list[Outcome], style: str, shape: str, chunk_tokens: int
) -> None:
    oracle = oracle_for(plain, style, shape)
    engine = speculating(runner, oracle, chunk_tokens=chunk_tokens)
    assert_same(run(engine, PROMPTS, PARAMS), plain)
    assert engine.scheduler.blocks.check([]) == []
    assert engine.scheduler.blocks.usage().used == 0
    assert sorted(oracle.released) == sorted(oracle.truth)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("style", STYLES)
def test_the_cache_is_correct_after_speculation(
    runner: ModelRunner, plain: list[Outcome], style: str, shape: str
) -> None:
    """Conversations go on from what speculation left in the prefix cache."""
    longer = [prompt + outcome.token_ids for prompt, outcome in zip(PROMPTS, plain, strict=True)]
    expected = run(build_engine(runner, prefix_caching=False), longer, greedy(8))

    oracle = oracle_for(plain, style, shape)
    engine = speculating(runner, oracle)
    run(engine, PROMPTS, PARAMS)
    oracle.truth = {f"request-{index}": outcome.token_ids for index, outcome in enumerate(expected)}
    again = run(engine, longer, greedy(8))
    assert_same(again, expected)
    for prompt, tokens, outcome in zip(PROMPTS, longer, again, strict=True):
        # Full blocks only; those that the last step filled need not be among them.
        assert len(prompt) // 4 * 4 <= outcome.outputs[0].num_cached_tokens <= (len(tokens) - 1) // 4 * 4
    if style != "too long" or shape == "tree":  # which has all its tokens in the last step
        assert any(
            outcome.outputs[0].num_cached_tokens > len(prompt) for prompt, outcome in zip(PROMPTS, again, strict=True)
        )
    assert engine.scheduler.blocks.check([]) == []


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("style", ["right", "half right", "random", "too long"])
def test_tokens_match_plain_decoding_under_preemption(
    runner: ModelRunner, plain: list[Outcome], style: str, shape: str
) -> None:
    engine = speculating(runner, oracle_for(plain, style, shape), num_blocks=20)
    assert_same(run(engine, PROMPTS, PARAMS), plain)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.blocks.check([]) == []


class RandomTrees(Oracle):
    """Trees of any shape, in which the right tokens are somewhere, deep or not at all."""

    def _draft(self, chain: list[int], limit: int) -> Draft:
        paths: list[list[int]] = [[]]
        parents: list[int] = []
        for _ in range(self.chance.randint(1, limit)):
            parent = self.chance.randrange(len(paths)) - 1
            path = paths[parent + 1]
            right = chain[len(path)] if path == chain[: len(path)] and len(path) < len(chain) else None
            token = right if right is not None and self.chance.random() < 0.8 else self.chance.randrange(VOCAB_SIZE)
            if [*path, token] not in paths:
                paths.append([*path, token])
                parents.append(parent)
        return Draft(tuple(path[-1] for path in paths[1:]), tuple(parents))


@pytest.mark.parametrize("num_blocks", [None, 20])
@pytest.mark.parametrize("seed", range(4))
def test_trees_of_any_shape_give_the_tokens_of_plain_decoding(
    runner: ModelRunner, plain: list[Outcome], seed: int, num_blocks: int | None
) -> None:
    longer = [prompt + outcome.token_ids for prompt, outcome in zip(PROMPTS, plain, strict=True)]
    expected = run(build_engine(runner, prefix_caching=False), longer, greedy(6))
    truth = {f"request-{index}": outcome.token_ids for index, outcome in enumerate(plain)}
    oracle = RandomTrees(truth, "right", chance=random.Random(seed))
    engine = speculating(runner, oracle, num_blocks=num_blocks)
    assert_same(run(engine, PROMPTS, PARAMS), plain)
    assert engine.scheduler.blocks.check([]) == []
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks is not None)
    assert any(result.nodes != tuple(range(len(result.nodes))) for result in oracle.results)
    assert any(len(result.nodes) >= 3 for result in oracle.results)

    # What the accepted nodes left in the cache is right, too.
    oracle.truth = {f"request-{index}": outcome.token_ids for index, outcome in enumerate(expected)}
    assert_same(run(engine, longer, greedy(6)), expected)


def test_right_drafts_save_steps_and_wrong_ones_cost_none(runner: ModelRunner, plain: list[Outcome]) -> None:
    num_outputs = {}
    for style in ("silent", "right", "wrong"):
        outcomes = run(speculating(runner, oracle_for(plain, style)), PROMPTS[:1], PARAMS[:1])
        num_outputs[style] = len(outcomes[0].outputs)
    assert num_outputs == {"silent": NUM_TOKENS, "right": 3, "wrong": NUM_TOKENS}  # 8 drafts and a bonus: 9 + 9 + 2


def test_results_distinguish_accepted_recovered_and_bonus_tokens(runner: ModelRunner, plain: list[Outcome]) -> None:
    truth = plain[0].token_ids
    right, half = oracle_for(plain, "right"), oracle_for(plain, "half right")
    run(speculating(runner, right), PROMPTS[:1], PARAMS[:1])
    run(speculating(runner, half), PROMPTS[:1], PARAMS[:1])
    first = right.results[0]
    assert (list(first.accepted), first.next_token, first.num_drafted) == (truth[:8], truth[8], 8)
    first = half.results[0]
    assert (list(first.accepted), first.next_token, first.num_drafted) == (truth[:2], truth[2], 8)


def test_drafts_end_with_the_request(runner: ModelRunner, plain: list[Outcome]) -> None:
    """What would be accepted behind a stop token or max_tokens is dropped, and is never verified beyond the limit."""
    oracle = oracle_for(plain, "too long")
    outcomes = run(speculating(runner, oracle), PROMPTS, PARAMS)
    assert outcomes[5].finish_reason is FinishReason.STOP
    assert outcomes[5].token_ids == plain[5].token_ids
    for result in oracle.results:
        request = result.sequence.request
        assert len(request.output_token_ids) <= request.params.max_tokens
        assert result.num_drafted < request.params.max_tokens


def test_outputs_name_the_method_whose_draft_was_verified(runner: ModelRunner, plain: list[Outcome]) -> None:
    methods = {"right": oracle_for(plain, "right"), "wrong": oracle_for(plain, "wrong")}
    for chosen in methods:
        controller = SpeculationController(registered(methods, 8), chosen)
        outcomes = run(speculating(runner, controller), PROMPTS[:2], PARAMS[:2])
        found = {(output.drafted_by, output.num_drafted > 0) for outcome in outcomes for output in outcome.outputs}
        assert found - {("", False)} == {(chosen, True)}


async def test_tokens_match_plain_decoding_through_the_asynchronous_engine(
    runner: ModelRunner, plain: list[Outcome]
) -> None:
    oracle = oracle_for(plain, "random")
    limits = SchedulerLimits(64, 64, runner.loaded.max_model_len)
    engine = AsyncEngine(runner, limits, verifier=SampleAndMatch(), proposer=oracle, num_threads=1)
    engine.start()

    async def one(index: int) -> Outcome:
        outcome = Outcome()
        async for output in engine.generate(Request(f"request-{index}", list(PROMPTS[index]), PARAMS[index])):
            outcome.outputs.append(output)
            outcome.token_ids.extend(output.token_ids)
        return outcome

    assert_same(await asyncio.gather(*(one(index) for index in range(len(PROMPTS)))), plain)
    stats = await engine.stats()
    assert stats.blocks.used == 0
    assert stats.num_generated_tokens == sum(len(outcome.token_ids) for outcome in plain)
    await engine.stop()
    assert oracle.num_accepted > 0


async def test_aborting_during_verification_affects_no_other_request(runner: ModelRunner, plain: list[Outcome]) -> None:
    oracle = oracle_for(plain, "random")
    limits = SchedulerLimits(64, 64, runner.loaded.max_model_len)
    engine = AsyncEngine(runner, limits, verifier=SampleAndMatch(), proposer=oracle, num_threads=1)
    engine.start()

    async def leave_after(index: int) -> None:
        outputs = engine.generate(Request(f"request-{index}", list(PROMPTS[index]), PARAMS[index]))
        for _ in range(1 + index % 3):
            await anext(outputs, None)
        await outputs.aclose()

    await asyncio.gather(*(leave_after(index) for index in range(len(PROMPTS))))
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks.used) == (0, 0, 0)
    assert await engine.call(lambda: engine.blocks.check([])) == []
    assert set(oracle.released) == set(oracle.truth)
    await engine.stop()
