"""A request through both workers: the transferred KV, every way to end, and sampling independent of the hand-off."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Container, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import ScheduledSequence
from baton.core.errors import ContextLengthError, InvalidRequestError, LayoutMismatchError, TransferError, rebuild_error
from baton.core.request import FinishReason, Request, SamplingParams
from baton.core.timeline import Event
from baton.engine.async_engine import AsyncEngine, generate_all
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.scheduler import Scheduler
from baton.rpc.conversions import unpack_events
from tests.credentials import send_to
from tests.engine_runs import BLOCK_SIZE, build_runner, greedy
from tests.integration.worker_pair import Answer, Runners, WorkerPair, pair_config, worker_pair
from tests.observers import CallOn
from tests.tiny_models import model_with_reference, random_prompts, tiny_model
from tests.waiting import TIMEOUT_S

PROMPTS = random_prompts((3, 9, 17, 30, 41))
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def reference() -> tuple[PreTrainedModel, list[list[int]]]:
    return model_with_reference("llama", PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def model(reference: tuple[PreTrainedModel, list[list[int]]]) -> PreTrainedModel:
    return reference[0]


@pytest.fixture(scope="module")
def runners(model: PreTrainedModel) -> Runners:
    return Runners.of(model)


@pytest.fixture(scope="module")
def expected(reference: tuple[PreTrainedModel, list[list[int]]]) -> list[list[int]]:
    return reference[1]


async def aggregated(runner: ModelRunner, prompt: list[int], params: SamplingParams) -> list[int]:
    """The same request on one engine that does everything."""
    engine = AsyncEngine(runner, SchedulerLimits(64, 16, runner.loaded.max_model_len), num_threads=1)
    engine.start()
    try:
        return await generate_all(engine, Request("request", list(prompt), params))
    finally:
        await engine.stop()


SAMPLED = (
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=11),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.3, top_k=20, top_p=0.9, seed=12),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, min_p=0.02, repetition_penalty=1.3, seed=13),
    SamplingParams(max_tokens=NUM_TOKENS, presence_penalty=1.0, frequency_penalty=0.5, seed=14, logprobs=3),
    SamplingParams(max_tokens=NUM_TOKENS, logit_bias=((7, 5.0), (9, -5.0)), stop_token_ids=(7,), min_tokens=6, seed=15),
)


@pytest.mark.parametrize("params", SAMPLED)
async def test_seeded_sampling_matches_a_single_engine(runners: Runners, params: SamplingParams) -> None:
    alone = [await aggregated(runners.decode, prompt, params) for prompt in PROMPTS]
    async with worker_pair(runners) as pair:
        answers = await asyncio.gather(*(pair.generate(prompt, params) for prompt in PROMPTS))
        assert [answer.token_ids for answer in answers] == alone
        if params.logprobs is not None:
            for answer in answers:
                assert len(answer.logprobs) == len(answer.token_ids)
                assert all(len(entry.top) == params.logprobs for entry in answer.logprobs)
        await pair.settle()


@pytest.mark.parametrize("methods", [("none",), ("none", "ngram")])
async def test_overlapped_steps_change_no_token(
    runners: Runners, methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds on both sides, even if requests with drafts share the worker."""
    alone = [await aggregated(runners.decode, prompt, params) for params in SAMPLED for prompt in PROMPTS]
    launched: list[str] = []
    schedule_ahead = Scheduler.schedule_ahead

    def noting(scheduler: Scheduler, ending: Container[str]) -> list[ScheduledSequence]:
        plan = schedule_ahead(scheduler, ending)
        launched.extend("prefill" if sequence.request.hands_off else "decode" for sequence in plan)
        return plan

    monkeypatch.setattr(Scheduler, "schedule_ahead", noting)
    config = pair_config(
        engine={"overlap_scheduling": "on"}, speculation={"method": "none"}, prefill={"chunk_tokens": 16}
    )
    async with worker_pair(runners, config) as pair:
        answers = await asyncio.gather(
            *(
                pair.generate(prompt, params, methods[number % len(methods)])
                for number, (params, prompt) in enumerate(itertools.product(SAMPLED, PROMPTS))
            )
        )
        assert [answer.token_ids for answer in answers] == alone
        # Alone: among the others every step may have had one that is drafted for.
        assert (await pair.generate(PROMPTS[0], SAMPLED[0], "none")).token_ids == alone[0]
        assert await pair.decode.problems() == await pair.prefill.problems() == []
    assert set(launched) == {"prefill", "decode"}


@pytest.mark.parametrize(("shared_memory", "connections", "share"), [("auto", 4, 1), ("off", 4, 0), ("off", 0, 0)])
async def test_tokens_do_not_depend_on_the_kv_transport(
    runners: Runners, expected: list[list[int]], shared_memory: str, connections: int, share: int
) -> None:
    config = pair_config(kv_transfer={"shared_memory": shared_memory, "connections": connections})
    async with worker_pair(runners, config) as pair:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            answer = await pair.generate(prompt, greedy(NUM_TOKENS))
            assert answer.token_ids == tokens
            assert answer.handoff is not None
            assert answer.handoff.num_shared_bytes == share * answer.handoff.num_bytes
            assert answer.handoff.num_bytes > 0
        await pair.settle()


@pytest.mark.parametrize("params", [greedy(NUM_TOKENS), *SAMPLED[:4]])
@pytest.mark.parametrize("num_known", [0, 1, 7])
async def test_a_lone_decode_worker_continues_with_the_same_tokens(
    runners: Runners, params: SamplingParams, num_known: int
) -> None:
    async with worker_pair(runners) as pair:
        for prompt in PROMPTS:
            whole = await pair.generate(prompt, params)
            resumed = Answer(token_ids=whole.token_ids[:num_known])
            await pair.continue_from(resumed, pair.new_id(), prompt, params)
            assert resumed.token_ids == whole.token_ids
            assert resumed.finish_reason is whole.finish_reason
        await pair.settle()


async def test_only_missing_tokens_are_transferred(runners: Runners) -> None:
    spec = runners.decode.spec
    system = random_prompts((21,), seed=5)[0]
    async with worker_pair(runners) as pair:
        received = 0
        for length, num_cached in ((10, 0), (25, 20), (11, 28), (3, 20)):
            prompt = system + random_prompts((length,), seed=length)[0][:length]
            if num_cached == 28:
                prompt = system + random_prompts((10,), seed=10)[0] + [5]
            answer = await pair.generate(prompt, greedy(4))
            assert answer.handoff is not None
            assert answer.handoff.num_cached_tokens == num_cached
            assert answer.handoff.num_tokens == len(prompt) - num_cached
            assert answer.handoff.num_bytes == (len(prompt) - num_cached) * spec.bytes_per_token
            received += answer.handoff.num_bytes
        assert (await pair.decode.client.stats()).kv_bytes_received == received
        assert (await pair.prefill.client.stats()).kv_bytes_sent == received
        await pair.settle()


async def test_tokens_cached_by_the_prefill_worker_are_transferred_too(
    runners: Runners, expected: list[list[int]]
) -> None:
    prompt = PROMPTS[3]
    config = pair_config()
    async with worker_pair(runners, config) as pair:
        # The prefill worker learns the prompt without a hand-off.
        message = pair.prefill_request(pair.new_id(), prompt, greedy(4))
        message.ClearField("handoff")
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as events:
            assert [event.HasField("first_token") async for event in events] == [True]

        answer = await pair.generate(prompt, greedy(NUM_TOKENS))
        assert answer.token_ids == expected[3]
        assert answer.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert answer.handoff is not None
        assert answer.handoff.num_cached_tokens == 0
        assert answer.handoff.num_bytes == len(prompt) * runners.decode.spec.bytes_per_token
        await pair.settle()


@pytest.mark.parametrize("how", ["max_tokens", "eos", "stop_token"])
async def test_a_first_token_that_is_the_last_ends_the_transfer(
    runners: Runners, expected: list[list[int]], how: str
) -> None:
    params = greedy(1 if how == "max_tokens" else NUM_TOKENS)
    first = expected[3][0]
    if how == "stop_token":
        params = replace(params, stop_token_ids=(first,))
    loaded = runners.prefill.loaded
    before = loaded.eos_token_ids
    if how == "eos":
        object.__setattr__(loaded, "eos_token_ids", frozenset({first}))
    try:
        async with worker_pair(runners) as pair:
            answer = await pair.generate(PROMPTS[3], params)
            assert answer.token_ids == [first]
            assert answer.finish_reason is (FinishReason.LENGTH if how == "max_tokens" else FinishReason.STOP)
            assert answer.handoff is None
            await pair.settle()
    finally:
        object.__setattr__(loaded, "eos_token_ids", before)


async def test_the_stream_reports_the_times_of_events(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        prompt, params, request_id = PROMPTS[4], greedy(4), pair.new_id()
        message = pair.prefill_request(request_id, prompt, params)
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            events = [event async for event in stream]
        assert [event.WhichOneof("kind") for event in events] == ["first_token", "handoff"]
        at_s = unpack_events(events[-1].events)
        order = [Event.PREFILL_QUEUED, Event.PREFILL_STARTED, Event.TRANSFER_STARTED, Event.TRANSFER_RESERVED]
        assert [at_s[event] for event in order] == sorted(at_s[event] for event in order)
        assert at_s[Event.FIRST_TOKEN_SAMPLED] <= at_s[Event.TRANSFER_ACKNOWLEDGED]
        assert events[-1].handoff.seconds > 0

        known = list(events[0].first_token.token_ids)
        await pair.continue_from(Answer(token_ids=known), request_id, prompt, params, message.handoff.transfer_id)
        await pair.settle()


async def test_the_first_token_does_not_wait_for_the_handoff(runners: Runners) -> None:
    config = pair_config(kv_transfer={"max_bytes_per_second": 20_000.0, "part_bytes": 4096})
    async with worker_pair(runners, config) as pair:
        prompt = PROMPTS[4]
        message = pair.prefill_request(pair.new_id(), prompt, greedy(4))
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            first, last = [event async for event in stream]
        at_s = unpack_events(last.events)
        num_bytes = len(prompt) * runners.decode.spec.bytes_per_token
        assert last.handoff.num_bytes == num_bytes
        assert last.handoff.seconds >= num_bytes / 20_000.0 - 0.2
        assert at_s[Event.TRANSFER_ACKNOWLEDGED] - unpack_events(first.events)[Event.FIRST_TOKEN_SAMPLED] > 0.2


async def test_kv_is_sent_while_the_prompt_is_still_computed(runners: Runners) -> None:
    config = pair_config(prefill={"chunk_tokens": 8})
    num_chunks, num_early_bytes = 0, 0
    async with worker_pair(runners, config) as pair:
        importer = pair.decode.role._importer

        def wait_before_the_last(_: Sequence[ScheduledSequence]) -> None:
            nonlocal num_chunks, num_early_bytes
            num_chunks += 1
            # A model so small is computed faster than anything is sent.
            give_up_at = time.monotonic() + TIMEOUT_S / 2
            while num_chunks == 19 and not num_early_bytes and time.monotonic() < give_up_at:
                time.sleep(0.01)
                num_early_bytes = importer.num_bytes_received

        pair.prefill.engine.subscribe(CallOn(computed=wait_before_the_last))
        prompt = random_prompts((160,), seed=8)[0]
        answer = await pair.generate(prompt, greedy(2))
        assert answer.handoff is not None
        assert answer.handoff.num_parts >= 20  # one at least for each of the 20 chunks
        assert num_chunks == 20
        assert num_early_bytes > 0
        await pair.settle()


async def test_workers_with_different_layouts_refuse_each_other(runners: Runners) -> None:
    async with worker_pair(Runners(runners.prefill, build_runner(tiny_model("llama", seed=5)))) as pair:
        with pytest.raises(LayoutMismatchError, match="model_fingerprint"):
            await pair.generate(PROMPTS[2], greedy(4))
        assert (await pair.decode.client.stats()).kv_bytes_received == 0
        await pair.settle()


async def test_a_lost_decode_worker_is_reported_and_the_source_is_freed(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        message = pair.prefill_request(pair.new_id(), PROMPTS[3], greedy(4))
        send_to(message.handoff, "127.0.0.1:1")
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            events = [event async for event in stream]
        assert events[0].HasField("first_token")
        assert events[1].handoff.error_code == "worker_lost"
        await pair.settle()


async def test_kv_is_sent_only_to_proven_peers(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        message = pair.prefill_request(pair.new_id(), PROMPTS[3], greedy(4))
        message.handoff.peer = "127.0.0.1:1"  # the proof is that of the decode worker
        with pytest.raises(InvalidRequestError, match="has not proved"):
            async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
                _ = [event async for event in stream]
        await pair.settle()


async def test_kv_of_another_prompt_is_refused(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        message = pair.prefill_request(pair.new_id(), PROMPTS[3], greedy(4))
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            events = [event async for event in stream]
        known = list(events[0].first_token.token_ids)
        with pytest.raises(TransferError, match="a different prompt"):
            await pair.continue_from(
                Answer(token_ids=known), "other", PROMPTS[4], greedy(4), message.handoff.transfer_id
            )
        await pair.settle()


async def test_kv_without_its_first_token_is_refused(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        message = pair.prefill_request(pair.new_id(), PROMPTS[3], greedy(4))
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            assert len([event async for event in stream]) == 2
        with pytest.raises(TransferError, match="does not know its first token"):
            await pair.continue_from(Answer(), "other", PROMPTS[3], greedy(4), message.handoff.transfer_id)
        await pair.settle()


async def test_both_workers_refuse_requests_that_cannot_run(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        for answer, prompt, params, error in (
            (Answer(), [999], greedy(4), InvalidRequestError),
            (Answer(token_ids=[999]), [5], greedy(4), InvalidRequestError),
            (Answer(), [5] * 200, greedy(4), ContextLengthError),
            (Answer(token_ids=[5, 6, 7, 8]), [5], greedy(4), InvalidRequestError),  # it has all its tokens already
            (Answer(token_ids=[5] * 100_000), [5], greedy(4), InvalidRequestError),
            (Answer(), [5], replace(greedy(4), stop_token_ids=(999,)), InvalidRequestError),
        ):
            with pytest.raises(error):
                await pair.continue_from(answer, pair.new_id(), prompt, params)
            if not answer.token_ids:
                with pytest.raises(error):
                    await pair.generate(prompt, params)
        assert len((await pair.generate(PROMPTS[0], greedy(4))).token_ids) == 4
        await pair.settle()


async def test_both_workers_refuse_transfer_ids_that_could_forge_log_lines(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        for transfer_id in ("a\nFORGED LINE", "a" * 300):
            message = pair.prefill_request(pair.new_id(), PROMPTS[0], greedy(4), transfer_id)
            with pytest.raises(InvalidRequestError, match="transfer_id must have 1 to 256 visible"):
                await anext(pair.prefill.client.prefill(message, TIMEOUT_S))
            with pytest.raises(InvalidRequestError, match="transfer_id must have 1 to 256 visible"):
                await pair.continue_from(Answer(token_ids=[5]), pair.new_id(), PROMPTS[0], greedy(4), transfer_id)
        await pair.settle()


async def test_a_handoff_waits_for_room_on_the_decode_worker(expected: list[list[int]], model: PreTrainedModel) -> None:
    config = pair_config(kv_transfer={"reserve_timeout_s": 60.0, "claim_timeout_s": 60.0})
    async with worker_pair(Runners.of(model, num_decode_blocks=20), config) as pair:
        tokens = await pair.generate_all(PROMPTS * 3, greedy(NUM_TOKENS))
        assert tokens == expected * 3
        await pair.settle()


async def test_a_prompt_too_large_for_the_decode_worker_fails_the_handoff(
    model: PreTrainedModel,
) -> None:
    async with worker_pair(Runners.of(model, num_decode_blocks=5)) as pair:
        message = pair.prefill_request(pair.new_id(), PROMPTS[4], greedy(4))
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            last = [event async for event in stream][-1]
        assert isinstance(rebuild_error(last.handoff.error_code, ""), ContextLengthError)
        await pair.settle()


async def test_a_request_can_be_repeated_before_its_first_attempt_ends(
    runners: Runners, expected: list[list[int]]
) -> None:
    """A router that tries again does not wait until the workers have heard of it."""
    async with worker_pair(runners) as pair:
        assert await _twice(pair) == [expected[4], expected[4]]
        await pair.settle()


async def _twice(pair: WorkerPair) -> list[list[int]]:
    messages = [pair.prefill_request("same-id", PROMPTS[4], greedy(NUM_TOKENS), f"same-id/{n}") for n in (1, 2)]
    streams = [pair.prefill.client.prefill(message, TIMEOUT_S) for message in messages]
    firsts = await asyncio.gather(*(anext(stream) for stream in streams))
    answers = [Answer(token_ids=list(first.first_token.token_ids)) for first in firsts]
    await asyncio.gather(
        *(
            pair.continue_from(answer, "same-id", PROMPTS[4], greedy(NUM_TOKENS), message.handoff.transfer_id)
            for answer, message in zip(answers, messages, strict=True)
        )
    )
    for stream in streams:
        await stream.aclose()
    return [answer.token_ids for answer in answers]
