"""The engine's step over tiny models: sampling, errors, and requests that do not touch each other."""

from __future__ import annotations

import math

import pytest
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import ScheduledSequence
from baton.core.queue_priority import QueuePriority
from baton.core.request import FinishReason, Request, SamplingParams
from baton.core.step_costs import STEP_PRIOR, Pace
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.verification import PlainSampling
from baton.engine.scheduling.ordering import EarliestDeadlineFirst
from baton.engine.scheduling.scheduler import Scheduler
from tests.engine_runs import BLOCK_SIZE, build_engine, build_runner, greedy, run, tokens_of
from tests.observers import CallOn
from tests.tiny_models import VOCAB_SIZE, random_prompts, tiny_model

PROMPTS = random_prompts((4, 9, 13, 22, 30, 1, 2, 41, 17, 8, 5, 33, 12, 3, 25, 6))


@pytest.fixture(scope="module", params=["llama", "gemma2", "mixtral"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return build_runner(tiny_model(request.param))


@pytest.fixture(scope="module")
def llama() -> ModelRunner:
    return build_runner(tiny_model("llama"))


def sampled(index: int) -> SamplingParams:
    varied = [{}, {"top_k": 20}, {"top_p": 0.8}, {"temperature": 0.7, "min_p": 0.05}, {"repetition_penalty": 1.2}]
    return SamplingParams(max_tokens=12, seed=1000 + index, **varied[index % len(varied)])


@pytest.mark.parametrize("chunk_tokens", [5, 64])
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch_of_sixteen(runner: ModelRunner, chunk_tokens: int) -> None:
    params = [sampled(index) for index in range(16)]
    together = tokens_of(run(build_engine(runner, chunk_tokens=chunk_tokens), PROMPTS, params))
    for index in range(16):
        alone = run(build_engine(runner), [PROMPTS[index]], [params[index]])
        assert tokens_of(alone) == [together[index]]


def test_different_seeds_differ_and_equal_seeds_repeat(llama: ModelRunner) -> None:
    def tokens(seed: int) -> list[int]:
        return run(build_engine(llama), [PROMPTS[0]], SamplingParams(max_tokens=12, seed=seed))[0].token_ids

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(seed)) for seed in range(8)}) == 8


def test_preemption_does_not_change_seeded_tokens(llama: ModelRunner) -> None:
    params = [sampled(index) for index in range(16)]
    expected = tokens_of(run(build_engine(llama), PROMPTS, params))
    tight = build_engine(llama, chunk_tokens=16, num_blocks=16)
    assert tokens_of(run(tight, PROMPTS, params)) == expected
    assert tight.scheduler.num_preemptions > 0


def test_order_and_targets_change_the_times_but_not_the_tokens(llama: ModelRunner) -> None:
    """Long prompts yield to more urgent later prompts, and are chunked while other sequences decode."""
    expected = tokens_of(run(build_engine(llama), PROMPTS, [sampled(index) for index in range(16)]))
    blocks, pace = BlockManager(512, BLOCK_SIZE), Pace(STEP_PRIOR)
    scheduler = Scheduler(SchedulerLimits(64, 16, 128), blocks, EarliestDeadlineFirst(), lambda: pace)
    engine = Engine(llama, scheduler)
    arrivals = [
        Request(
            str(index),
            list(prompt),
            sampled(index),
            queue_priority=QueuePriority(index % 3, 16.0 - index),
            tpot_target_s=1e-6,
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    found: list[list[int]] = [[] for _ in PROMPTS]
    num_chunks = [0] * len(PROMPTS)
    while arrivals or scheduler.has_work():
        if arrivals:
            scheduler.add(arrivals.pop(0))
        for output in engine.step():
            found[int(output.request_id)].extend(output.token_ids)
            num_chunks[int(output.request_id)] += sum(num_tokens > 1 for _, num_tokens in output.steps)
    assert found == expected
    assert max(num_chunks) > 1


def test_penalties_and_bias_affect_the_tokens(llama: ModelRunner) -> None:
    forced = SamplingParams(max_tokens=3, temperature=0, logit_bias=((77, 100.0),))
    (outcome,) = run(build_engine(llama), [PROMPTS[1]], forced)
    assert outcome.token_ids == [77, 77, 77]
    varied = SamplingParams(max_tokens=20, temperature=0, frequency_penalty=2.0, presence_penalty=2.0)
    plain, penalised = run(build_engine(llama), [PROMPTS[1]] * 2, [greedy(20), varied])
    assert len(set(penalised.token_ids)) > len(set(plain.token_ids))


def test_stop_tokens_end_a_request_and_min_tokens_delays_them(llama: ModelRunner) -> None:
    (free,) = run(build_engine(llama), [PROMPTS[2]], greedy(10))
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    stopping = SamplingParams(max_tokens=10, temperature=0, stop_token_ids=(stop,))
    held = SamplingParams(max_tokens=10, temperature=0, stop_token_ids=(stop,), min_tokens=6)
    stopped, later = run(build_engine(llama), [PROMPTS[2]] * 2, [stopping, held])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert stop not in later.token_ids[:6]
    assert len(later.token_ids) >= 6


def test_requested_logprobs_come_with_every_token(llama: ModelRunner) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=3)
    asked, not_asked = run(build_engine(llama), [PROMPTS[0], PROMPTS[0]], [params, greedy(5)])
    assert all(output.logprobs is None for output in not_asked.outputs)
    for output in asked.outputs:
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) == 1
        (logprobs,) = output.logprobs
        assert logprobs.top[0] == (output.token_ids[0], logprobs.logprob)
        assert sum(math.exp(value) for _, value in logprobs.top) < 1


def test_a_handoff_leaves_after_its_first_token_with_its_prompt_cached(llama: ModelRunner) -> None:
    expected = run(build_engine(llama), [PROMPTS[3]], greedy(1))[0].token_ids
    engine = build_engine(llama, chunk_tokens=8)
    engine.scheduler.add(Request("leaving", PROMPTS[3], greedy(50), hands_off=True))
    outputs = []
    while engine.scheduler.has_work():
        outputs += engine.step()
    (output,) = outputs
    assert list(output.token_ids) == expected
    assert output.finish_reason is FinishReason.HANDED_OFF
    follow_up = Request("follow-up", PROMPTS[3], greedy(1))
    assert engine.scheduler.blocks.match_prefix(follow_up) == (len(PROMPTS[3]) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_request_with_imported_kv_continues_as_if_computed_locally(llama: ModelRunner) -> None:
    """KV is copied as bytes between two caches with different block tables."""
    prompt, expected = PROMPTS[7], run(build_engine(llama), [PROMPTS[7]], greedy(10))[0].token_ids
    source = build_engine(llama)
    source.scheduler.add(Request("request", prompt, greedy(50)))
    source.step()
    layers = range(len(llama.spec.layers))
    blocks = source.scheduler.get("request").block_ids
    exported = llama.cache.export_bytes(blocks, 0, len(prompt), layers)

    target = build_engine(llama)
    target.scheduler.blocks.pool.allocate(3)
    received = Request("request", prompt, greedy(10), output_token_ids=expected[:1])
    target.scheduler.blocks.grow(received, len(prompt))
    llama.cache.import_bytes(received.block_ids, 0, len(prompt), layers, memoryview(exported))
    received.num_computed_tokens = len(prompt)
    target.scheduler.add(received)
    while target.scheduler.has_work():
        target.step()
    assert received.output_token_ids == expected


class _SpoilsOne(PlainSampling):
    """Replaces one request's logits by something that is not a number, from its second token on."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        logits = logits.clone()
        for sequence, rows in zip(batch.sequences, batch.rows_of, strict=True):
            if sequence.request.request_id == "request-3" and sequence.request.output_token_ids and rows:
                logits[rows[0]] = math.nan
        return super().verify(batch, logits)


def test_nan_logits_end_one_request_and_leave_no_trace(llama: ModelRunner) -> None:
    expected = tokens_of(run(build_engine(llama), PROMPTS, greedy(8)))
    healthy = build_engine(llama)
    engine = Engine(llama, healthy.scheduler, _SpoilsOne())
    outcomes = run(engine, PROMPTS, greedy(8))
    for index, outcome in enumerate(outcomes):
        if index == 3:
            assert outcome.finish_reason is FinishReason.ERROR
            assert str(outcome.outputs[-1].error) == "the model produced logits that are not finite"
            assert outcome.token_ids == expected[3][:1]
        else:
            assert outcome.token_ids == expected[index]
    blocks = engine.scheduler.blocks
    assert blocks.check([]) == []
    assert blocks.find_prefix(Request("again", PROMPTS[3], greedy(1)), len(PROMPTS[3]) // BLOCK_SIZE) == []
    assert blocks.find_prefix(Request("other", PROMPTS[4], greedy(1)), len(PROMPTS[4]) // BLOCK_SIZE) != []


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mistral"])
def test_nan_kv_of_one_sequence_does_not_reach_others(name: str) -> None:
    """Sequences of different lengths share a padded gather; the padding must not read another sequence's KV."""
    runner = build_runner(tiny_model(name))
    engine = build_engine(runner)
    manager = BlockManager(64, BLOCK_SIZE, prefix_caching=False)
    spoiled, short, long = (Request(str(length), [7] * length, greedy(4)) for length in (8, 10, 14))
    for request in (spoiled, short, long):
        manager.grow(request, request.num_tokens)
    assert 0 in spoiled.block_ids
    plan = [ScheduledSequence(request, request.num_tokens) for request in (short, long)]
    first = runner.forward(engine.runner.build_batch(plan))
    for request in (short, long):
        request.num_computed_tokens = request.num_tokens
        request.output_token_ids = [9]
        manager.grow(request, request.num_tokens)
    decode = runner.forward(runner.build_batch([ScheduledSequence(request, 1) for request in (short, long)]))
    assert torch.isfinite(first).all()
    assert torch.isfinite(decode).all()
    assert decode.shape == (2, VOCAB_SIZE)


def test_observers_see_the_plan_before_and_after_the_step(llama: ModelRunner) -> None:
    seen: list[tuple[str, int]] = []
    scheduler = build_engine(llama, chunk_tokens=16).scheduler
    engine = Engine(
        llama,
        scheduler,
        observers=[
            CallOn(
                lambda plan: seen.append(("scheduled", plan[0].request.num_computed_tokens)),
                lambda plan: seen.append(("computed", plan[0].request.num_computed_tokens)),
            )
        ],
    )
    run(engine, [PROMPTS[3]], greedy(2))
    assert seen == [
        ("scheduled", 0), ("computed", 16), ("scheduled", 16), ("computed", 22), ("scheduled", 22), ("computed", 23),
    ]  # fmt: skip


def test_a_step_without_work_does_nothing(llama: ModelRunner) -> None:
    engine = build_engine(llama)
    assert engine.step() == []
    assert not engine.last_step_ran


def test_a_step_without_tokens_still_waits_for_the_device(llama: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait, the step's time would be that of its launch, and the device would queue up steps."""
    waits: list[None] = []
    monkeypatch.setattr(llama, "wait_for_device", lambda: waits.append(None))
    prompt = random_prompts((41,))[0]
    assert len(run(build_engine(llama, chunk_tokens=16), [prompt], greedy(4))[0].token_ids) == 4
    assert len(waits) == 2  # of three steps over the prompt and three more
