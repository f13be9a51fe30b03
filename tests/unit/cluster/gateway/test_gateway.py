"""The gateway over real HTTP, in front of a fake router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from baton.core.errors import OverloadedError, WorkerLostError
from baton.core.request import FinishReason
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.work_threads import WorkThreads
from cluster.requests.generation import GenerationRequest, TokenChunk
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import ALIAS, CONTEXT_LENGTH, MODEL, TEXT, FakeAdmin, FakeGenerator, Step, say
from tests.waiting import TIMEOUT_S, until

TOKENIZER = byte_level_tokenizer()
NUM_TOKENS = len(TOKENIZER.encode(TEXT, add_special_tokens=False))
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT = {"model": MODEL, "messages": HELLO}
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 32}


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# --- The official client ---------------------------------------------------------------------------------------------


async def test_chat_completions_match_the_generated_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.id == answer._request_id
    assert answer.usage is not None
    assert answer.usage.completion_tokens == NUM_TOKENS + 1
    assert answer.usage.prompt_tokens == len(TOKENIZER.apply_chat_template(HELLO))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_chat_completions_can_be_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *news, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in news) == TEXT
    assert [chunk.choices[0].delta.role for chunk in news] == ["assistant"] + [None] * (len(news) - 1)
    assert [chunk.choices[0].finish_reason for chunk in news] == [None] * (len(news) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in news)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == NUM_TOKENS + 1


async def test_completions_match_the_generated_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="hello", max_tokens=3)
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert TEXT.startswith(answer.choices[0].text)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_completions_can_be_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=32, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_echo_comes_first_and_once(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="say: ", max_tokens=32, echo=True)
    assert answer.choices[0].text == "say: " + TEXT
    stream = await client.completions.create(model=MODEL, prompt="say: ", max_tokens=32, echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "say: " + TEXT


async def test_several_prompts_and_choices_have_their_index(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    def script(request: GenerationRequest) -> list[Step]:
        (token_id,) = TOKENIZER.encode("ab"[request.prompt_token_ids[0] - 1], add_special_tokens=False)
        return [TokenChunk((token_id,), None, FinishReason.LENGTH)]

    generator.script = script
    answer = await client.completions.create(model=MODEL, prompt=[[1], [2]], n=2, seed=7)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert sorted(request.request_id for request in generator.requests) == [f"{answer.id}-{i}" for i in range(4)]
    assert len({request.params.seed for request in generator.requests}) == 2
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 4)


async def test_choices_are_streamed_concurrently(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts, order = ["", "", ""], []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            order.append(choice.index)
    assert texts == [TEXT] * 3
    assert order != sorted(order)


async def test_further_choices_wait_for_the_first_token_of_the_first(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    started_with: dict[str, list[str]] = {}
    speak = say(TOKENIZER, TEXT)

    def script(request: GenerationRequest) -> Any:
        started_with[request.request_id] = list(generator.first_chunks)
        return speak(request)

    generator.script = script
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3)
    assert started_with[f"{answer.id}-0"] == []
    assert f"{answer.id}-0" in started_with[f"{answer.id}-1"]
    assert f"{answer.id}-0" in started_with[f"{answer.id}-2"]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions_return_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = await http.post("/v1/chat/completions", json=body)
    choices = [event["choices"][0] for event in events(response.text)[:-1]] if stream else response.json()["choices"]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    # The end token has its entry too, so that their number is that of the tokens.
    assert len(entries) == NUM_TOKENS + 1
    assert "".join(entry["token"] for entry in entries[:-1]) == TEXT
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("body", "is_large"),
    [({"prompt": ["hello"] * 600}, True), ({"logprobs": 5, "n": 64}, True), ({"logprobs": 5}, False)],
    ids=["choices", "log probabilities", "one choice"],
)
async def test_large_answers_are_written_in_a_thread(
    body: dict[str, Any], is_large: bool, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, called = WorkThreads.run, []

    async def noted(self: WorkThreads, size: int, function: Any, *args: Any) -> Any:
        called.append(function.__qualname__)
        return await run(self, size, function, *args)

    monkeypatch.setattr(WorkThreads, "run", noted)
    answer = await http.post("/v1/completions", json={**COMPLETION, **body})
    assert {choice["text"] for choice in answer.json()["choices"]} == {TEXT}
    assert any("_collect" in name for name in called) == is_large


async def test_completions_return_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="hello", max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_output_and_cancels_the_work(
    http: httpx.AsyncClient, generator: FakeGenerator, stream: bool
) -> None:
    response = await http.post("/v1/completions", json={**COMPLETION, "stop": ["quick", "zzz"], "stream": stream})
    choices = [event["choices"][0] for event in events(response.text)[:-1]] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "hello world, the "
    assert choices[-1]["finish_reason"] == "stop"
    assert generator.cancelled == [generator.requests[0].request_id]


async def test_a_finished_sequence_is_not_cancelled(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    for stream in (False, True):
        await http.post("/v1/chat/completions", json={**CHAT, "stream": stream, "n": 2})
    assert len(generator.completed) == 4
    assert generator.cancelled == []


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL, ALIAS]
    assert (await client.models.retrieve(MODEL)).owned_by == "baton"
    with pytest.raises(openai.NotFoundError, match=MODEL):
        await client.models.retrieve("other")


# --- Streams ---------------------------------------------------------------------------------------------------------


async def test_the_first_token_is_sent_before_the_rest_is_generated(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = lambda request: [TokenChunk(tuple(TOKENIZER.encode("hello"))), None]
    async with (
        asyncio.timeout(TIMEOUT_S),
        http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        line = await anext(answer.aiter_lines())
    assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == "hello"


async def test_continuous_usage_counts_up(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": options}
    *chunks, usage, done = events((await http.post("/v1/chat/completions", json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == list(range(1, NUM_TOKENS + 2))
    assert usage["usage"]["completion_tokens"] == NUM_TOKENS + 1
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token_have_their_status(
    http: httpx.AsyncClient, generator: FakeGenerator, stream: bool
) -> None:
    generator.script = lambda request: [OverloadedError("The queue is full.", retry_after_s=2.3)]
    response = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"] == {
        "message": "The queue is full.",
        "type": "rate_limit_error",
        "param": None,
        "code": "overloaded",
    }


async def test_errors_in_a_stream_are_events_that_end_it(client: openai.AsyncOpenAI, generator: FakeGenerator) -> None:
    generator.script = lambda request: [TokenChunk((40,)), WorkerLostError("The decode worker died.")]
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="The decode worker died"):
        _ = [chunk async for chunk in stream]


async def test_the_failure_of_one_choice_cancels_the_others(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    def script(request: GenerationRequest) -> list[Step]:
        is_second = request.request_id.endswith("-1")
        return [TokenChunk((40,)), WorkerLostError("gone") if is_second else None]

    generator.script = script
    response = await http.post("/v1/chat/completions", json={**CHAT, "n": 3})
    assert response.status_code == 503
    await until(lambda: len(generator.cancelled) == 2)


# --- Clients that go away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}])
@pytest.mark.parametrize("first", [[], [TokenChunk((40,))]], ids=["before_a_token", "after_a_token"])
async def test_a_disconnect_cancels_every_sequence(
    http: httpx.AsyncClient, generator: FakeGenerator, body: dict[str, Any], first: list[Step]
) -> None:
    generator.script = lambda request: [*first, None]
    num_running = body.get("n", 1) if first else 1
    request = asyncio.create_task(http.post("/v1/chat/completions", json={**CHAT, **body}))
    await until(lambda: len(generator.requests) == num_running)
    await asyncio.sleep(0.02)
    assert generator.cancelled == []
    request.cancel()
    await until(lambda: len(generator.cancelled) == num_running)


async def test_a_disconnect_affects_no_other_request(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    speak = say(TOKENIZER, TEXT)
    generator.script = lambda request: [None] if request.params.max_tokens == 1 else speak(request)
    hanging = asyncio.create_task(http.post("/v1/completions", json={**COMPLETION, "max_tokens": 1}))
    await until(lambda: len(generator.requests) == 1)
    answers = asyncio.gather(*(http.post("/v1/completions", json=COMPLETION) for _ in range(5)))
    hanging.cancel()
    assert [answer.json()["choices"][0]["text"] for answer in await answers] == [TEXT] * 5


# --- Request ids and timelines ---------------------------------------------------------------------------------------


async def test_the_request_id_of_the_client_is_used(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    response = await http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "bench-1.a_B"})
    assert response.headers["x-request-id"] == response.json()["id"] == "bench-1.a_B"
    assert generator.requests[0].request_id == "bench-1.a_B"


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a/b"])
async def test_unusable_request_ids_are_replaced(http: httpx.AsyncClient, given: str) -> None:
    response = await http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": given})
    assert response.headers["x-request-id"].startswith("cmpl-")


async def test_a_request_id_in_use_is_not_reused(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    speak = say(TOKENIZER, TEXT)
    generator.script = lambda request: [None] if len(generator.requests) == 1 else speak(request)
    headers = {"X-Request-Id": "same"}
    hanging = asyncio.create_task(http.post("/v1/completions", json=COMPLETION, headers=headers))
    await until(lambda: len(generator.requests) == 1)
    second = await http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert second.headers["x-request-id"] == second.json()["id"] != "same"
    hanging.cancel()
    await until(lambda: generator.cancelled == ["same"])
    third = await http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert third.json()["id"] == "same"


@pytest.mark.parametrize(
    ("kept", "wanted", "num_choices", "is_free"),
    [
        ({"theirs"}, "theirs", 1, False),
        ({"theirs"}, "theirs", 2, False),
        ({"theirs-1"}, "theirs", 2, False),
        ({"theirs-1"}, "theirs", 1, True),
        ({"theirs-1"}, "theirs-2", 1, True),
        ({"theirs"}, "mine", 1, True),
    ],
)
async def test_an_id_with_a_stored_timeline_is_not_reused(
    kept: set[str], wanted: str, num_choices: int, is_free: bool, generator: FakeGenerator
) -> None:
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(), is_kept=kept.__contains__)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        body = {**COMPLETION, "n": num_choices}
        response = await client.post("/v1/completions", json=body, headers={"X-Request-Id": wanted})
    found = response.headers["x-request-id"]
    assert found == response.json()["id"]
    assert (found == wanted) is is_free
    assert found.startswith(wanted)
    given = {request.request_id for request in generator.requests}
    assert given.isdisjoint(kept)
    assert {request.timeline.group for request in generator.requests} == {found if num_choices > 1 else None}


# --- Names of the model ----------------------------------------------------------------------------------------------


async def test_all_names_of_the_model_are_listed(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL, ALIAS]
    for name in (MODEL, ALIAS):
        body = (await http.get(f"/v1/models/{name}")).json()
        assert (body["id"], body["root"], body["max_model_len"]) == (name, MODEL, CONTEXT_LENGTH)


@pytest.mark.parametrize(("asked", "answered"), [(MODEL, MODEL), (ALIAS, ALIAS), (None, MODEL)])
async def test_answers_echo_the_name_that_was_asked_for(
    http: httpx.AsyncClient, asked: str | None, answered: str
) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", COMPLETION)):
        whole = await http.post(f"/v1/{path}", json={**body, "model": asked})
        assert whole.json()["model"] == answered
        streamed = await http.post(f"/v1/{path}", json={**body, "model": asked, "stream": True})
        *chunks, _ = events(streamed.text)
        assert {chunk["model"] for chunk in chunks} == {answered}
