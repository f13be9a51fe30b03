"""Log probabilities of prompts equal those of the model's own forward, however the prompt is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.core.prompt_logprobs import MAX_SCORED_TOKENS, PromptLogprobs
from baton.core.request import Request, SamplingParams
from baton.engine.batch.batch import ForwardBatch
from baton.engine.engine import Engine
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.prompt_scores import queue_scores
from baton.engine.step.overlap import always
from tests.device_waits import DeviceWaits
from tests.engine_runs import build_engine, build_runner, greedy, run
from tests.tiny_models import VOCAB_SIZE, random_prompts, tiny_model

NUM_TOP = 5
TOLERANCE = 1e-4
PROMPTS = random_prompts((30, 2, 41, 1, 17))
ASKING = SamplingParams(max_tokens=3, temperature=0, repetition_penalty=1.5, prompt_logprobs=NUM_TOP)


@pytest.fixture(scope="module", params=["auto", "transformers"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return build_runner(tiny_model("llama"), decoder=request.param)


@torch.inference_mode()
def check(found: PromptLogprobs | None, runner: ModelRunner, prompt: list[int], num_top: int = NUM_TOP) -> None:
    logits = tiny_model("llama")(torch.tensor([prompt])).logits[0, :-1].float()
    expected = torch.log_softmax(logits, dim=-1)
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])
    assert found is not None
    assert len(found) == len(prompt) - 1
    np.testing.assert_allclose(found.logprobs, own[:, 0].numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(found.top_logprobs, expected.topk(num_top).values.numpy(), atol=TOLERANCE)
    at_top = expected.gather(1, torch.from_numpy(found.top_ids).long())
    np.testing.assert_allclose(found.top_logprobs, at_top.numpy(), atol=TOLERANCE)
    likelier = [(expected > own + sign * TOLERANCE).sum(dim=-1).numpy() for sign in (1, -1)]
    assert (likelier[0] < found.ranks).all()
    assert (found.ranks <= 1 + likelier[1]).all()


def first_outputs(engine: Engine, params: SamplingParams, prompts: list[list[int]]) -> list[PromptLogprobs | None]:
    outcomes = run(engine, prompts, params)
    assert all(output.prompt_logprobs is None for outcome in outcomes for output in outcome.outputs[1:])
    return [outcome.outputs[0].prompt_logprobs for outcome in outcomes]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("chunk_tokens", [7, 64, 1024])
def test_they_equal_a_plain_forward(runner: ModelRunner, chunk_tokens: int, runs_ahead: bool) -> None:
    options = {"runs_ahead": always} if runs_ahead else {}
    engine = build_engine(runner, chunk_tokens=chunk_tokens, **options)
    for prompt, found in zip(PROMPTS, first_outputs(engine, ASKING, PROMPTS), strict=True):
        check(found, runner, prompt)


def test_a_cached_prefix_is_not_used_but_left_for_others(runner: ModelRunner) -> None:
    engine = build_engine(runner)
    prompt = PROMPTS[2]
    for _ in range(2):
        (outcome,) = run(engine, [prompt], ASKING)
        assert outcome.outputs[0].num_cached_tokens == 0
        check(outcome.outputs[0].prompt_logprobs, runner, prompt)
    (other,) = run(engine, [prompt], greedy(1))
    assert other.outputs[0].num_cached_tokens > 0
    assert other.outputs[0].prompt_logprobs is None


def test_a_preempted_prompt_gets_them_again(runner: ModelRunner) -> None:
    engine = build_engine(runner, chunk_tokens=16, num_blocks=16)
    params = SamplingParams(max_tokens=20, temperature=0, prompt_logprobs=0)
    prompts = random_prompts((30, 9, 25, 22))
    for prompt, found in zip(prompts, first_outputs(engine, params, prompts), strict=True):
        check(found, runner, prompt, num_top=0)
    assert engine.scheduler.num_preemptions > 0


def test_steps_never_hold_more_rows_than_the_limit(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(runner, chunk_tokens=1024, num_blocks=512)
    rows: list[int] = []
    build = ForwardBatch.build

    def counting(*args: object) -> ForwardBatch:
        batch = build(*args)
        rows.append(batch.num_prompt_rows)
        return batch

    monkeypatch.setattr(ForwardBatch, "build", counting)
    prompts = random_prompts((100, 100, 100))
    found = first_outputs(engine, ASKING, prompts)
    assert max(rows) == MAX_SCORED_TOKENS
    assert sum(rows) == 297
    for prompt, each in zip(prompts, found, strict=True):
        check(each, runner, prompt)


def test_requests_that_did_not_ask_keep_their_whole_chunk(runner: ModelRunner) -> None:
    engine = build_engine(runner, chunk_tokens=1024)
    asking, plain = random_prompts((100, 120))
    engine.scheduler.add(Request("asking", asking, ASKING))
    engine.scheduler.add(Request("plain", plain, greedy(2)))
    assert [sequence.num_tokens for sequence in engine.scheduler.schedule()] == [100, 120]


def test_no_value_on_the_device_decides_what_is_queued(runner: ModelRunner) -> None:
    engine = build_engine(runner)
    for index, prompt in enumerate(PROMPTS):
        engine.scheduler.add(Request(str(index), prompt, ASKING))
    batch = runner.build_batch(engine.scheduler.schedule())
    waits = DeviceWaits()
    waits.watch(lambda: queue_scores(batch, torch.empty(batch.num_prompt_rows, VOCAB_SIZE, device="meta")))
    assert batch.num_prompt_rows > 0
    assert waits.waits == []


def test_logits_that_are_not_numbers_fail_the_request(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(runner)
    forward = runner.forward

    def broken(batch: ForwardBatch) -> torch.Tensor:
        logits = forward(batch).clone()
        if batch.num_prompt_rows:
            logits[-1] = float("nan")
        return logits

    monkeypatch.setattr(runner, "forward", broken)
    asking, plain = run(engine, [PROMPTS[0], PROMPTS[2]], [ASKING, greedy(3)])
    assert "not finite" in str(asking.outputs[-1].error)
    assert len(plain.token_ids) == 3
