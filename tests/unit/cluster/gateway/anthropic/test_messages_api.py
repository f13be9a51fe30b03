"""``/v1/messages`` over real HTTP, with the official client in front of a fake router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from baton.core.errors import NoWorkerError
from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.requests.generation import TokenChunk
from tests.unit.cluster.fakes import ALIAS, MODEL, FakeAdmin, say, serve
from tests.unit.cluster.gateway.test_tool_calls import ANSWER, CALL, TOKENIZER, Generator
from tests.waiting import TIMEOUT_S

KEY = "a-key-of-this-test-0123"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {"name": "get_weather", "input_schema": {"type": "object"}},
    {"name": "now", "input_schema": {"type": "object"}},
]
BODY = {"messages": HELLO, "max_tokens": 500}


class Sailor(BaseModel):
    name: str


@pytest.fixture
def generator() -> Generator:
    return Generator(TOKENIZER, say(TOKENIZER, ANSWER, cached=3))


@pytest.fixture
async def client(generator: Generator) -> AsyncIterator[anthropic.AsyncAnthropic]:
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(comment_every_s=0.2))
    async with serve(app) as url, anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def http_to(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


async def ask(client: anthropic.AsyncAnthropic, **fields: Any) -> Any:
    return await client.messages.create(**{"model": MODEL, **BODY, "tools": TOOLS, **fields})


async def test_a_message_has_thinking_text_and_tool_uses(client: anthropic.AsyncAnthropic) -> None:
    message = await ask(client, model=ALIAS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].input == {"city": "Oslo"}
    assert (message.model, message.stop_reason) == (ALIAS, "tool_use")
    assert message.id == message._request_id
    assert message.usage.cache_read_input_tokens == 3


async def test_the_official_client_joins_the_stream(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=500, tools=TOOLS) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(texts) == "Ok."
    whole = await ask(client)
    assert [block.to_dict() | {"id": ""} for block in message.content] == [
        block.to_dict() | {"id": ""} for block in whole.content
    ]
    assert message.stop_reason == whole.stop_reason
    assert message.usage == whole.usage


async def test_the_official_client_parses_a_format(client: anthropic.AsyncAnthropic, generator: Generator) -> None:
    generator.script = say(TOKENIZER, '{"name": "Ann"}')
    message = await client.messages.parse(model=MODEL, messages=HELLO, max_tokens=99, output_format=Sailor)
    assert message.parsed_output == Sailor(name="Ann")
    assert generator.requests[0].params.grammar


async def test_the_stop_sequence_is_named(client: anthropic.AsyncAnthropic) -> None:
    message = await ask(client, stop_sequences=["never", "<tool_call>"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "<tool_call>")
    async with client.messages.stream(model=MODEL, stop_sequences=["Ok"], **BODY) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "Ok")


async def test_tokens_are_counted_as_they_are_charged(client: anthropic.AsyncAnthropic) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "system": "Be brief."}
    counted = await client.messages.count_tokens(**fields)
    usage = (await ask(client, system="Be brief.")).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "stop_sequences", "stream", "service_tier", "seed"])
async def test_a_count_has_no_parameters_of_an_answer(client: anthropic.AsyncAnthropic, name: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.messages.count_tokens(model=MODEL, messages=HELLO, extra_body={name: 1})
    body: Any = caught.value.body
    assert body["error"]["message"] == (
        f"{name} is a parameter of /v1/messages, which does not change the number of tokens of a prompt. Leave it out "
        "of /v1/messages/count_tokens."
    )


async def test_every_message_can_be_sent_back(client: anthropic.AsyncAnthropic, generator: Generator) -> None:
    history: list[Any] = [*HELLO]
    for text in (ANSWER, CALL, "Ok.", "<tool_call>nope</tool_call>", "<think>Hm.", ""):
        for stream in (False, True):
            generator.script = say(TOKENIZER, text)
            if stream:
                async with client.messages.stream(model=MODEL, messages=history, max_tokens=500, tools=TOOLS) as events:
                    message: Any = await events.get_final_message()
            else:
                message = await ask(client, messages=history)
            content = [block.to_dict() for block in message.content]
            uses = [block["id"] for block in content if block["type"] == "tool_use"]
            history.append({"role": "assistant", "content": content})
            results = [{"type": "tool_result", "tool_use_id": use, "content": "rain"} for use in uses]
            history.append({"role": "user", "content": [*results, {"type": "text", "text": "hello"}]})
    prompt = TOKENIZER.decode(generator.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.count('"name": "get_weather", "arguments": {"city": "Oslo"}') == 4
    assert prompt.count("rain") == 6


async def test_a_last_message_of_the_assistant_is_continued(
    client: anthropic.AsyncAnthropic, generator: Generator
) -> None:
    await client.messages.create(
        model=MODEL, max_tokens=9, messages=[*HELLO, {"role": "assistant", "content": "The best"}]
    )
    assert TOKENIZER.decode(generator.requests[0].prompt_token_ids, skip_special_tokens=False).endswith("The best")


async def test_a_stream_that_fails_midway_raises_in_the_client(
    client: anthropic.AsyncAnthropic, generator: Generator
) -> None:
    tokens = TOKENIZER.encode("Ok")
    generator.script = lambda _: [TokenChunk((token,)) for token in tokens] + [NoWorkerError("No worker.")]
    with pytest.raises(anthropic.APIStatusError) as caught:
        [event async for event in await ask(client, stream=True)]
    assert caught.value.body["error"] == {"type": "overloaded_error", "message": "No worker."}  # type: ignore[index]


async def test_a_silent_stream_sends_pings(generator: Generator) -> None:
    generator.script = lambda _: [None]
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(comment_every_s=0.01))
    async with (
        serve(app) as url,
        httpx.AsyncClient(base_url=url) as http,
        http.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as answer,
    ):
        lines = answer.aiter_lines()
        assert [await asyncio.wait_for(anext(lines), TIMEOUT_S) for _ in range(2)] == [
            "event: ping",
            'data: {"type":"ping"}',
        ]


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "but messages has"),
        ({"stop_sequences": [""] * 17}, "stop_sequences has 17"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name must be 1 to 128"),
        ({"extra_body": {"made_up": 2}}, "Unknown parameter"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers is not supported"),
        ({"extra_headers": {"anthropic-version": "2023-01-01"}}, "anthropic-version '2023-01-01'"),
    ],
)
async def test_errors_name_the_parameters_of_this_api(
    client: anthropic.AsyncAnthropic, fields: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await ask(client, **fields)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert fragment in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id


async def test_a_model_that_is_not_served_is_not_found(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await ask(client, model="other")


async def test_keys_come_in_either_header(generator: Generator) -> None:
    keys = ApiKeys([ApiKeyConfig.model_validate({"name": "me", "key": KEY})])
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(), api_keys=keys)
    async with await http_to(app) as http:
        for headers in ({"x-api-key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            assert (await http.post("/v1/messages", json=BODY, headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": "other"}, {"x-api-key": KEY, "Authorization": "Bearer other"}):
            answer = await http.post("/v1/messages", json=BODY, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


async def test_unknown_paths_below_have_errors_in_the_same_form(generator: Generator) -> None:
    async with await http_to(create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits())) as http:
        missing = await http.post("/v1/messages/batches", json={})
        wrong = await http.get("/v1/messages/")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_numbers_that_do_not_fit_64_bits_are_no_internal_error(http: httpx.AsyncClient) -> None:
    large = 10**30
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"n": large}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"n": large}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maxProperties": large}}}
    user = {"role": "user", "content": "a"}
    for path, messages, more in (
        ("/v1/messages", [user, {"role": "assistant", "content": [use]}, user], {}),
        ("/v1/chat/completions", [user, {"role": "assistant", "tool_calls": [call]}, user], {}),
        ("/v1/chat/completions", [user], {"tools": [tool]}),
    ):
        answer = await http.post(path, json={"messages": messages, "max_tokens": 2, **more})
        assert answer.status_code in (200, 400), answer.text


async def test_half_a_character_in_a_history_is_no_error(http: httpx.AsyncClient) -> None:
    """A model may write half a character into the input of a tool, and clients send the history again."""
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"half \ude00": ["cut \ud83d"]}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"cut": "\ud83d"}}}
    user = {"role": "user", "content": "cut \ud83d"}
    for path, calling in (
        ("/v1/messages", {"role": "assistant", "content": [use]}),
        ("/v1/chat/completions", {"role": "assistant", "tool_calls": [call]}),
    ):
        body = json.dumps({"messages": [user, calling, user], "max_tokens": 2})
        answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text


async def test_the_tool_runner_of_the_official_client_gets_its_answer(
    client: anthropic.AsyncAnthropic, generator: Generator
) -> None:
    """It asks for a thread first, and sends the whole conversation when that is refused."""

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather."""
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(
        model=MODEL, messages=HELLO, max_tokens=500, tools=[get_weather], max_iterations=2
    )
    messages = [message async for message in runner]
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    assert "rain in Oslo" in TOKENIZER.decode(list(generator.requests[-1].prompt_token_ids))
