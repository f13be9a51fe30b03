"""Steps that are launched before the tokens of the step before them are known give the same tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.drafts import ScheduledSequence
from baton.core.request import FinishReason, Request, SamplingParams, TokenOutput
from baton.engine.batch.batch import ForwardBatch
from baton.engine.device.downloads import Download
from baton.engine.engine import Engine
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.step.overlap import always
from tests.engine_runs import Outcome, build_engine, build_runner, greedy, run, tokens_of
from tests.observers import CallOn, SeenSteps
from tests.tiny_models import random_prompts, tiny_model

PROMPTS = random_prompts((4, 9, 13, 22, 30, 1, 2, 41, 17, 8, 5, 33, 12, 3, 25, 6))


def sampled(index: int, max_tokens: int = 12, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
    varied: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_k": 20, "logprobs": 2},
        {"top_p": 0.8, "min_tokens": min(3, max_tokens)},
        {"temperature": 0.7, "min_p": 0.05},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    ]
    own = varied[index % len(varied)]
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, seed=1000 + index, **own)


def in_turns(seed: int) -> Callable[[Sequence[ScheduledSequence]], bool]:
    """As where requests that are drafted for come and go."""
    rng = random.Random(seed)
    return lambda plan: rng.random() < 0.5


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("chunk_tokens", [5, 64])
@pytest.mark.parametrize("rule", [always, in_turns(1)], ids=["always", "in-turns"])
def test_tokens_and_logprobs_match_synchronous_steps(
    name: str, chunk_tokens: int, rule: Callable[[Sequence[ScheduledSequence]], bool]
) -> None:
    runner = build_runner(tiny_model(name))
    params = [sampled(index) for index in range(16)]
    expected = run(build_engine(runner, chunk_tokens=chunk_tokens), PROMPTS, params)
    engine = build_engine(runner, chunk_tokens=chunk_tokens, runs_ahead=rule)
    found = run(engine, PROMPTS, params)
    assert tokens_of(found) == tokens_of(expected)
    for mine, other in zip(found, expected, strict=True):
        assert [output.logprobs for output in mine.outputs] == [output.logprobs for output in other.outputs]
        assert mine.finish_reason is other.finish_reason
    assert engine.scheduler.blocks.check([]) == []


def test_a_step_is_launched_before_the_previous_tokens_are_read(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    forward, read = runner.forward, Download.read

    def noting_forward(batch: ForwardBatch) -> torch.Tensor:
        happened.append("forward")
        return forward(batch)

    def noting_read(download: Download) -> torch.Tensor:
        happened.append("read")
        return read(download)

    monkeypatch.setattr(runner, "forward", noting_forward)
    monkeypatch.setattr(Download, "read", noting_read)
    run(build_engine(runner, chunk_tokens=8, runs_ahead=always), [PROMPTS[2]], greedy(3))
    # Two chunks of the prompt, two more tokens; what comes behind the third is known not to be wanted.
    assert happened == ["forward", "forward", "read", "forward", "read", "forward", "read", "read"]
    happened.clear()
    run(build_engine(runner, chunk_tokens=8), [PROMPTS[2]], greedy(3))
    assert happened == ["forward", "read"] * 4


def test_logits_need_not_outlive_sampling(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of CUDA graphs, which lie in memory that the next step overwrites."""
    params = [sampled(index) for index in range(8)]
    expected = run(build_engine(runner), PROMPTS[:8], params)
    forward, last = runner.forward, [torch.zeros(0)]

    def overwriting(batch: ForwardBatch) -> torch.Tensor:
        last[0].fill_(torch.nan)
        last[0] = forward(batch).clone()  # not an inference tensor, so that it may be written to
        return last[0]

    monkeypatch.setattr(runner, "forward", overwriting)
    found = run(build_engine(runner, runs_ahead=always), PROMPTS[:8], params)
    assert [o.logprobs for each in found for o in each.outputs] == [o.logprobs for e in expected for o in e.outputs]
    assert tokens_of(found) == tokens_of(expected)


@pytest.mark.parametrize("num_blocks", [14, 16, 20])
def test_preemption_changes_no_token(runner: ModelRunner, num_blocks: int) -> None:
    params = [sampled(index) for index in range(16)]
    expected = tokens_of(run(build_engine(runner), PROMPTS, params))
    tight = build_engine(runner, chunk_tokens=16, num_blocks=num_blocks, runs_ahead=always)
    assert tokens_of(run(tight, PROMPTS, params)) == expected
    assert tight.scheduler.num_preemptions > 0
    assert tight.scheduler.blocks.check([]) == []


def test_a_stop_token_ends_a_request_whose_next_step_has_started(runner: ModelRunner) -> None:
    free = run(build_engine(runner), PROMPTS, greedy(10))
    stop = {outcome.token_ids[3] for outcome in free[::2]}
    params = SamplingParams(max_tokens=10, temperature=0, stop_token_ids=tuple(sorted(stop)))
    expected = run(build_engine(runner), PROMPTS, params)
    engine = build_engine(runner, runs_ahead=always)
    found = run(engine, PROMPTS, params)
    assert FinishReason.STOP in {outcome.finish_reason for outcome in expected}
    assert [(o.token_ids, o.finish_reason) for o in found] == [(o.token_ids, o.finish_reason) for o in expected]
    assert engine.scheduler.blocks.check([]) == []
    assert engine.step() == []  # what was launched for those that stopped is forgotten
    assert not engine.last_step_ran


def test_nothing_is_scheduled_after_a_prompt_that_hands_off(runner: ModelRunner) -> None:
    expected = [outcome.token_ids[0] for outcome in run(build_engine(runner), PROMPTS, greedy(1))]
    engine = build_engine(runner, chunk_tokens=8, runs_ahead=always)
    scheduled: dict[str, int] = dict.fromkeys(map(str, range(len(PROMPTS))), 0)
    computed: dict[str, int] = {}

    def note(plan: Sequence[ScheduledSequence]) -> None:
        for sequence in plan:
            scheduled[sequence.request.request_id] += sequence.num_tokens

    def book(plan: Sequence[ScheduledSequence]) -> None:
        computed.update({s.request.request_id: s.request.num_computed_tokens for s in plan})

    engine.subscribe(CallOn(note, book))
    for index, prompt in enumerate(PROMPTS):
        engine.scheduler.add(Request(str(index), list(prompt), greedy(50), hands_off=True, arrival_s=index))
    outputs: list[TokenOutput] = []
    while engine.scheduler.has_work():
        outputs += engine.step()
    assert {output.request_id: output.token_ids[0] for output in outputs} == {
        str(index): token for index, token in enumerate(expected)
    }
    assert {output.finish_reason for output in outputs} == {FinishReason.HANDED_OFF}
    assert scheduled == computed == {str(index): len(prompt) for index, prompt in enumerate(PROMPTS)}
    assert engine.scheduler.blocks.check([]) == []


def test_a_request_reusing_an_aborted_id_gets_its_own_tokens(runner: ModelRunner) -> None:
    """The aborted one is still in the step that is on the device."""
    expected = run(build_engine(runner), [PROMPTS[3]], greedy(6))[0].token_ids
    engine = build_engine(runner, runs_ahead=always)
    first = Request("same", list(PROMPTS[4]), greedy(20))
    engine.scheduler.add(first)
    engine.step()
    engine.step()
    engine.finish("same", FinishReason.ABORT)
    engine.scheduler.add(Request("same", list(PROMPTS[3]), greedy(6)))
    found: list[int] = []
    while engine.scheduler.has_work():
        found += [token for output in engine.step() for token in output.token_ids]
    assert found == expected
    assert len(first.output_token_ids) == 2
    assert engine.scheduler.blocks.check([]) == []


def test_nan_kv_is_never_found_in_the_prefix_cache(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by the step that is scheduled before the token is read."""
    forward = runner.forward

    def spoiling(batch: ForwardBatch) -> torch.Tensor:
        logits = forward(batch).clone()
        for sequence, rows in zip(batch.sequences, batch.rows_of, strict=True):
            if sequence.request.request_id == "request-0" and rows:
                logits[rows[0]] = torch.nan
        return logits

    monkeypatch.setattr(runner, "forward", spoiling)
    prompt = PROMPTS[7]
    engine = build_engine(runner, chunk_tokens=len(prompt), runs_ahead=always)
    spoiled, alike = run(engine, [prompt, prompt], greedy(4))
    assert str(spoiled.outputs[-1].error) == "the model produced logits that are not finite"
    assert spoiled.token_ids == []
    assert alike.finish_reason is FinishReason.LENGTH
    assert alike.outputs[0].num_cached_tokens == 0
    assert engine.scheduler.blocks.check([]) == []


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_cannot_be_launched_ahead_is_retried_after_the_tokens_are_read(
    runner: ModelRunner, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward, num_forwards = runner.forward, [0]

    def breaking(batch: ForwardBatch) -> torch.Tensor:
        num_forwards[0] += 1
        if 3 <= num_forwards[0] < 3 + times:
            raise RuntimeError("out of memory")
        return forward(batch)

    expected = run(build_engine(runner, max_num_seqs=2), PROMPTS[:4], greedy(5))
    monkeypatch.setattr(runner, "forward", breaking)
    engine = build_engine(runner, max_num_seqs=2, runs_ahead=always)
    found = run(engine, PROMPTS[:4], greedy(5))
    assert "out of memory" in caplog.text
    if times == 2:  # those that ran lose what is not computed, and nothing else
        assert [outcome.finish_reason for outcome in found] == [FinishReason.ERROR] * 2 + [FinishReason.LENGTH] * 2
        assert "RuntimeError" in str(found[0].outputs[-1].error)
        assert tokens_of(found[:2]) == [outcome.token_ids[:2] for outcome in expected[:2]]
    assert tokens_of(found[2 if times == 2 else 0 :]) == tokens_of(expected[2 if times == 2 else 0 :])
    assert engine.scheduler.blocks.check([]) == []


def test_unreadable_tokens_end_only_their_requests(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step on the device that they are in, too, and a prompt that came meanwhile."""
    expected = run(build_engine(runner), PROMPTS[:2], greedy(5))
    read, num_reads = Download.read, [0]

    def breaking(download: Download) -> torch.Tensor:
        num_reads[0] += 1
        if num_reads[0] == 2:
            raise RuntimeError("the device is lost")
        return read(download)

    monkeypatch.setattr(Download, "read", breaking)
    engine = build_engine(runner, runs_ahead=always)
    engine.scheduler.add(Request("first", list(PROMPTS[0]), greedy(5)))
    found: dict[str, Outcome] = {"first": Outcome(), "second": Outcome()}
    for step in range(20):
        if step == 1:
            engine.scheduler.add(Request("second", list(PROMPTS[1]), greedy(5)))
        for output in engine.step():
            found[output.request_id].outputs.append(output)
            found[output.request_id].token_ids.extend(output.token_ids)
    assert found["first"].finish_reason is FinishReason.ERROR
    assert found["first"].token_ids == expected[0].token_ids[:1]
    assert found["second"].token_ids == expected[1].token_ids
    assert engine.scheduler.blocks.check([]) == []


def test_a_request_waits_for_the_end_of_the_step_before_its_own(runner: ModelRunner) -> None:
    engine = build_engine(runner, chunk_tokens=8, runs_ahead=always)
    requests = [Request(str(index), list(PROMPTS[3]), greedy(3), arrival_s=index) for index in range(3)]
    for request in requests:
        engine.scheduler.add(request)
    firsts: dict[str, float] = {}
    while engine.scheduler.has_work():
        for output in engine.step():
            firsts.setdefault(output.request_id, output.steps[0][0].started_s)
    assert [request.first_scheduled_s for request in requests[1:]] == [firsts["1"], firsts["2"]]


def test_steps_do_not_overlap_in_a_timeline(runner: ModelRunner) -> None:
    engine, seen = build_engine(runner, chunk_tokens=16, runs_ahead=always), SeenSteps()
    engine.subscribe(seen)
    for outcome in run(engine, PROMPTS[:6], greedy(6)):
        steps = [step for output in outcome.outputs for step, _ in output.steps]
        assert steps
        for before, after in itertools.pairwise(steps):
            assert before.ended_s <= after.started_s <= after.ended_s
    assert len(seen.samples) == engine.meter._num_steps
    assert all(sample.ms > 0 for sample in seen.samples)


class _Arrivals:
    """Requests that come, and are aborted, while others are on the device."""

    def __init__(self, engine: Engine, requests: Sequence[Request], aborts: Sequence[bool], rng: random.Random) -> None:
        self._engine = engine
        self._left = list(zip(requests, aborts, strict=True))
        self._rng = rng
        self._doomed: list[Request] = []
        self.aborted: set[str] = set()

    def act(self) -> None:
        while self._left and self._rng.random() < 0.6:
            request, is_doomed = self._left.pop(0)
            self._engine.scheduler.add(request)
            if is_doomed:
                self._doomed.append(request)
        for request in list(self._doomed):
            if self._rng.random() < 0.3:
                self._doomed.remove(request)
                if not request.is_finished:
                    self.aborted.add(request.request_id)
                    self._engine.finish(request.request_id, FinishReason.ABORT)

    def are_left(self) -> bool:
        return bool(self._left) or self._engine.scheduler.has_work()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_are_the_same_under_arrivals_aborts_and_shortage(runner: ModelRunner, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**16))
    indices = data.draw(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=8))
    lengths = [data.draw(st.integers(1, 9)) for _ in indices]
    stops = [tuple(data.draw(st.lists(st.integers(0, 95), max_size=6, unique=True))) for _ in indices]
    leaving = [data.draw(st.booleans()) for _ in indices]
    params = list(map(sampled, indices, lengths, stops))
    prompts = [PROMPTS[index] for index in indices]
    expected = [
        run(build_engine(runner), [prompt], own)[0].token_ids[: 1 if leaves else None]
        for prompt, own, leaves in zip(prompts, params, leaving, strict=True)
    ]
    engine = build_engine(
        runner,
        chunk_tokens=data.draw(st.sampled_from((4, 9, 64))),
        max_num_seqs=data.draw(st.sampled_from((1, 2, 8))),
        num_blocks=data.draw(st.sampled_from((14, 20, 200))),
        prefix_caching=data.draw(st.booleans()),
        runs_ahead=data.draw(st.sampled_from((always, in_turns(seed)))),
    )
    requests = [
        Request(str(number), list(prompt), own, hands_off=leaves, arrival_s=number)
        for number, (prompt, own, leaves) in enumerate(zip(prompts, params, leaving, strict=True))
    ]
    rng = random.Random(seed)
    arrivals = _Arrivals(engine, requests, [data.draw(st.booleans()) for _ in requests], rng)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for _ in range(2000):
        arrivals.act()
        for output in engine.step():
            assert output.error is None
            found[output.request_id].extend(output.token_ids)
        if not arrivals.are_left():
            break
    else:
        raise AssertionError("not done")
    for number, request in enumerate(requests):
        got = found[request.request_id]
        if request.request_id in arrivals.aborted:
            assert got == expected[number][: len(got)]
        else:
            assert got == expected[number]
        assert request.output_token_ids == got
    assert engine.scheduler.blocks.check([]) == []
