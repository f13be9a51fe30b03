"""Hand-offs between devices that compute by themselves: KV that is on its way is neither read nor written over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest
import torch
from transformers import PreTrainedModel

import baton.engine.kv_cache.paged_cache
from baton.core.errors import BatonError
from baton.engine.batch.batch import ForwardBatch
from baton.engine.kv_cache.kv_copies import WatchedCopies
from baton.engine.runner.model_runner import ModelRunner
from tests.engine_runs import greedy
from tests.integration.test_handoff_int8 import with_rounded_prompt
from tests.integration.worker_pair import Runners, pair_config, worker_pair
from tests.late_copies import LateCopies
from tests.tiny_models import model_with_reference, random_prompts
from tests.unit.baton.engine.test_device_faults import LOST, OUT_OF_MEMORY
from tests.waiting import TIMEOUT_S

PROMPTS = random_prompts((3, 9, 17, 30, 41))
NUM_TOKENS = 16
WAYS = {
    "shared": {},
    "connected": {"shared_memory": "off"},
    "messages": {"shared_memory": "off", "connections": 0},
    "nixl": {"shared_memory": "off", "transport": "nixl"},
}
EACH_WAY = [pytest.param(way, marks=pytest.mark.nixl) if way == "nixl" else way for way in WAYS]


@pytest.fixture(scope="module")
def reference() -> tuple[PreTrainedModel, list[list[int]]]:
    return model_with_reference("llama", PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def runners(reference: tuple[PreTrainedModel, list[list[int]]]) -> Iterator[Runners]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baton.engine.kv_cache.paged_cache, "copy_queue_for", lambda device: LateCopies())
        yield Runners.of(reference[0])


def copies_of(runner: ModelRunner) -> LateCopies:
    watched = runner.cache._copies
    assert isinstance(watched, WatchedCopies)
    assert isinstance(watched._queue, LateCopies)
    return watched._queue


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("way", EACH_WAY)
async def test_tokens_match_the_model(
    runners: Runners,
    reference: tuple[PreTrainedModel, list[list[int]]],
    way: str,
    overlap: str,
) -> None:
    sent, received = copies_of(runners.prefill), copies_of(runners.decode)
    num_sent, num_received = len(sent.fetched_after), len(received.brought_after)
    config = pair_config(
        kv_transfer=WAYS[way],
        engine={"overlap_scheduling": overlap},
        speculation={"method": "none"},
    )
    async with worker_pair(runners, config) as pair:
        answers = await asyncio.gather(*(pair.generate(prompt, greedy(NUM_TOKENS)) for prompt in PROMPTS))
        assert [answer.token_ids for answer in answers] == reference[1]
        await pair.settle()
    assert len(sent.fetched_after) - num_sent == len(received.brought_after) - num_received > 0
    marks = [*sent.fetched_after[num_sent:], *received.brought_after[num_received:]]
    assert {mark.thread for mark in marks} == {"baton-engine"}  # between steps; elsewhere it would be any point of one
    assert not received.num_coming


@pytest.mark.parametrize("way", EACH_WAY)
async def test_int8_is_rounded_once(runners: Runners, way: str) -> None:
    expected = [await with_rounded_prompt(runners.decode, prompt) for prompt in PROMPTS]
    transfer = {"encoding": "int8", **WAYS[way]}
    async with worker_pair(runners, pair_config(kv_transfer=transfer, speculation={"draft": "none"})) as pair:
        answers = await asyncio.gather(*(pair.generate(prompt, greedy(NUM_TOKENS)) for prompt in PROMPTS))
        assert [answer.token_ids for answer in answers] == expected
        await pair.settle()


async def test_data_of_an_abandoned_transfer_arrives_before_its_blocks_are_reused(
    runners: Runners, reference: tuple[PreTrainedModel, list[list[int]]]
) -> None:
    received = copies_of(runners.decode)
    async with worker_pair(runners, pair_config(kv_transfer={"shared_memory": "off"})) as pair:
        for prompt in PROMPTS:  # cancelled at the first token: parts are in flight and unclaimed
            message = pair.prefill_request(pair.new_id(), prompt, greedy(NUM_TOKENS))
            async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as events:
                await anext(events)
        await pair.settle()
        assert not received.num_coming
        for prompt, tokens in zip(PROMPTS, reference[1], strict=True):
            assert (await pair.generate(prompt, greedy(NUM_TOKENS))).token_ids == tokens


async def test_each_part_waits_only_for_the_step_that_computed_it(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, forward = copies_of(runners.prefill), runners.prefill.forward

    def counted(batch: ForwardBatch) -> torch.Tensor:
        logits = forward(batch)
        sent.num_steps += 1
        return logits

    monkeypatch.setattr(runners.prefill, "forward", counted)
    num_before, steps_before = len(sent.fetched_after), sent.num_steps
    config = pair_config(prefill={"chunk_tokens": 16}, kv_transfer={"shared_memory": "off"})
    async with worker_pair(runners, config) as pair:
        await pair.generate(random_prompts((44,), seed=5)[0], greedy(4))
        await pair.settle()
    steps = [mark.step - steps_before for mark in sent.fetched_after[num_before:]]
    assert steps == sorted(steps)
    assert set(steps) == {1, 2, 3}


async def test_waiting_for_a_slow_device_does_not_block_the_event_loop(
    runners: Runners, reference: tuple[PreTrainedModel, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    received = copies_of(runners.decode)
    monkeypatch.setattr(received, "max_behind", 1)
    for connections in (4, 0):
        num_waits = received.num_waits
        transfer = {"shared_memory": "off", "connections": connections, "part_bytes": 4096}
        async with worker_pair(runners, pair_config(kv_transfer=transfer)) as pair:
            assert (await pair.generate(PROMPTS[-1], greedy(NUM_TOKENS))).token_ids == reference[1][-1]
            await pair.settle()
        assert received.num_waits > num_waits


COPY_PLACES = [
    ("prefill", "mark"),
    ("prefill", "fetch"),
    ("decode", "mark"),
    ("decode", "host_memory"),
    ("decode", "bring"),
    ("decode", "join"),
]


def break_copies(
    monkeypatch: pytest.MonkeyPatch, copies: LateCopies, place: str, make: Callable[[], Exception]
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise make()

    monkeypatch.setattr(copies, place, fails)


@pytest.mark.parametrize(("side", "place"), COPY_PLACES)
async def test_a_device_lost_during_a_copy_ends_the_engine(
    runners: Runners, monkeypatch: pytest.MonkeyPatch, side: str, place: str
) -> None:
    """A decode worker whose hand-offs all fail never runs a step, which would find out."""
    config = pair_config(kv_transfer={"shared_memory": "off"}, speculation={"method": "none"})
    async with worker_pair(runners, config) as pair:
        break_copies(monkeypatch, copies_of(getattr(runners, side)), place, LOST["illegal-address"])
        with pytest.raises(BatonError):
            await pair.generate(PROMPTS[1], greedy(NUM_TOKENS))
        async with asyncio.timeout(TIMEOUT_S):
            await getattr(pair, side).engine.closed.wait()


@pytest.mark.parametrize(("side", "place"), COPY_PLACES)
async def test_a_copy_without_memory_fails_only_its_own_request(
    runners: Runners, reference: tuple[PreTrainedModel, list[list[int]]], side: str, place: str
) -> None:
    config = pair_config(kv_transfer={"shared_memory": "off"}, speculation={"method": "none"})
    async with worker_pair(runners, config) as pair:
        with pytest.MonkeyPatch.context() as patch:
            break_copies(patch, copies_of(getattr(runners, side)), place, OUT_OF_MEMORY["torch"])
            with pytest.raises(BatonError):
                await pair.generate(PROMPTS[1], greedy(NUM_TOKENS))
        assert (await pair.generate(PROMPTS[1], greedy(NUM_TOKENS))).token_ids == reference[1][1]
        await pair.settle()
