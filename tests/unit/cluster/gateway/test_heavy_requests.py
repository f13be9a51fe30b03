"""Requests that would take long are bounded before any work, and their work leaves the event loop free."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import BatonError, ContextLengthError, InvalidRequestError
from cluster.gateway.openai import prompt_encoder
from cluster.gateway.openai.json_body import JsonLimits, json_limits, parse_object
from cluster.gateway.openai.model_inputs import count_messages, split_prompts
from cluster.gateway.openai.prompt_encoder import Chat, PromptEncoder
from cluster.gateway.work_threads import WorkThreads
from tests.unit.cluster.gateway.test_openai_api import CARD, TOKENIZER, plan_chat, plan_completion

EMPTY = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}
LIMITS = JsonLimits(max_entries=20, max_keys=10)


def nothing(*_: object, **__: object) -> Any:
    raise AssertionError("work began before the bound was checked")


@pytest.mark.parametrize(
    "messages",
    [[EMPTY] * (CARD.max_model_len + 1), [{"role": "user", "content": [PART] * CARD.max_model_len}]],
    ids=["messages", "parts"],
)
async def test_a_chat_has_at_most_as_many_messages_as_the_context_has_tokens(
    messages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(TOKENIZER), "render_chat", nothing)
    with pytest.raises(InvalidRequestError, match="messages has 65 messages and content parts; at most 64") as caught:
        await plan_chat(messages=messages)
    assert caught.value.param == "messages"


def test_the_number_of_messages_and_prompts_is_bounded_whatever_the_context() -> None:
    with pytest.raises(InvalidRequestError, match="has 8193 messages and content parts; at most 8192"):
        count_messages([EMPTY] * 8193)
    for prompt in (["a"] * 1025, [[1]] * 1025):
        with pytest.raises(InvalidRequestError, match="prompt has 1025 prompts; at most 1024"):
            split_prompts(prompt)


@pytest.mark.parametrize("extra", [{}, {"best_of": 1}])
async def test_only_a_part_of_a_text_that_is_too_long_is_encoded(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    lengths: list[int] = []
    encode = type(TOKENIZER).encode

    def counted(self: Any, text: str, *args: Any, **kwargs: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(TOKENIZER), "encode", counted)
    for plan in (
        plan_completion(prompt="x" * 2100, **extra),
        plan_chat(messages=[{"role": "user", "content": "x" * 2100}]),
    ):
        with pytest.raises(ContextLengthError, match=r"the first 1024 of .* alone have .* tokens"):
            await plan
    assert lengths == [1024, 1024]
    await plan_completion(prompt="x" * 2100, truncate_prompt_tokens=3)
    assert lengths[2:] == [2100]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"a": [0] * 25}, "entries of arrays and objects; at most 20"),
        ({"a": [[]] * 15}, "entries of arrays and objects; at most 20"),
        ({"a": [{}] * 15}, "entries of arrays and objects; at most 20"),
        (dict.fromkeys("abcdefghijk", 0), "has 11 keys; at most 10"),
        ({"a": [""] * 40}, "entries"),
    ],
)
def test_the_entries_and_keys_of_a_body_are_bounded(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        parse_object(json.dumps(body).encode(), LIMITS)


@pytest.mark.parametrize("text", [",[{:" * 50, '",' * 50, '\\\\",' * 50, "\\" * 51, '\\"' * 50])
def test_marks_within_strings_are_not_counted(text: str) -> None:
    for body in ({"a": text}, {text: [text, 1]}):
        assert parse_object(json.dumps(body).encode(), LIMITS) == body


def test_a_long_context_allows_as_many_token_ids() -> None:
    assert json_limits(8192) == JsonLimits()
    assert json_limits(2**20).max_entries == 2**22


@pytest.mark.parametrize("body", [b'{"a": {"b": 1, "b": 2}}', b'{"a": 1, "\xc3\xbc": 2, "\xc3\xbc": 3}'])
def test_a_key_that_occurs_twice_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"The key '(b|ü)' occurs twice in one JSON object"):
        parse_object(body)


async def test_encoding_lets_the_event_loop_run() -> None:
    """The longest pass of the loop is a small part of the call, where a call that keeps the lock would be all of it."""
    text, began = "hello world, " * 40_000, threading.Event()

    def encode() -> float:
        began.set()
        began_s = time.perf_counter()
        TOKENIZER.encode(text)
        return time.perf_counter() - began_s

    call = asyncio.create_task(asyncio.to_thread(encode))
    num_passes = 0
    while not call.done():
        num_passes += began.is_set()
        await asyncio.sleep(0)
    assert num_passes > 20


async def test_few_calls_run_at_once_and_the_smallest_is_the_next() -> None:
    threads, release, order = WorkThreads(1), threading.Event(), []
    calls = [asyncio.create_task(threads.run(0, release.wait))]
    calls += [asyncio.create_task(threads.run(size, order.append, size)) for size in (30, 10, 20, 10)]
    await asyncio.sleep(0)
    calls[1].cancel()
    release.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert order == [10, 10, 20]
    assert await threads.run(1, len, "abc") == 3


async def test_a_cancelled_caller_frees_the_thread_when_its_call_ends() -> None:
    threads, release = WorkThreads(1), threading.Event()
    first = asyncio.create_task(threads.run(0, release.wait))
    second = asyncio.create_task(threads.run(0, len, "ab"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0.01)
    assert not second.done()
    release.set()
    assert await second == 2


async def test_errors_of_a_call_reach_its_caller() -> None:
    with pytest.raises(BatonError, match="not valid JSON"):
        await WorkThreads().run(1, parse_object, b"{")


class _Threads(WorkThreads):
    """Notes what is called in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    async def run(self, size: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.called.append(function.__name__)
        return function(*args, **kwargs)


async def test_lists_that_are_too_long_are_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_encoder, "split_prompts", nothing)
    for prompt in ([7] * 2000, [[7] * 2000]):
        with pytest.raises(ContextLengthError, match="prompt has a list of 2000 entries") as caught:
            await plan_completion(prompt=prompt)
        assert caught.value.param == "prompt"


async def test_many_messages_and_token_ids_are_checked_in_a_thread() -> None:
    threads = _Threads()
    encoder = PromptEncoder(TOKENIZER, threads)
    card = replace(CARD, max_model_len=100_000)
    await encoder.encode_prompts(await encoder.split([7] * 90_000, 1, card), card, False)
    assert threads.called == ["split_prompts", "encode"]
    threads.called.clear()
    await encoder.encode_chat(Chat([EMPTY] * 100), card)
    assert threads.called == ["check_messages", "encode"]
    threads.called.clear()
    await encoder.encode_prompts(await encoder.split([7] * 1000, 1, card), card, False)
    await encoder.encode_chat(Chat([EMPTY] * 10), card)
    assert threads.called == []


async def test_truncated_lists_may_be_long() -> None:
    plan = await plan_completion(prompt=[7] * 2000, truncate_prompt_tokens=3)
    assert plan.prompts[0].token_ids == (7, 7, 7)
