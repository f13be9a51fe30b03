"""``/v1/responses`` over real HTTP, with the official client in front of a fake router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from baton.core.errors import NoWorkerError
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.requests.generation import TokenChunk
from tests.unit.cluster.fakes import ALIAS, MODEL, FakeAdmin, say, serve
from tests.unit.cluster.gateway.test_tool_calls import ANSWER, CALL, TOKENIZER, Generator

TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
MADE_UP = {"input": "hello", "made_up": 1}


class Sailor(BaseModel):
    name: str


@pytest.fixture
def generator() -> Generator:
    return Generator(TOKENIZER, say(TOKENIZER, ANSWER))


@pytest.fixture
async def client(generator: Generator) -> AsyncIterator[openai.AsyncOpenAI]:
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(comment_every_s=0.2))
    async with (
        serve(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.responses.create(**{"model": MODEL, "input": "hello", "tools": TOOLS, **fields})


async def test_a_response_has_reasoning_text_and_calls(client: openai.AsyncOpenAI) -> None:
    response = await ask(client, model=ALIAS)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (response.output_text, response.status, response.model) == ("Ok.", "completed", ALIAS)
    assert response.output[2].arguments == '{"city": "Oslo"}'
    assert response.id.startswith("resp_")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_the_prompt_is_that_of_the_same_chat(client: openai.AsyncOpenAI, generator: Generator) -> None:
    await ask(client, instructions="Be brief.")
    functions = [{key: value for key, value in tool.items() if key != "type" and value is not None} for tool in TOOLS]
    await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        tools=[{"type": "function", "function": function} for function in functions],  # type: ignore[typeddict-item]
    )
    ours, theirs = generator.requests
    assert ours.prompt_token_ids == theirs.prompt_token_ids


async def test_the_official_client_joins_the_stream(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model=MODEL, input="hello", tools=TOOLS) as stream:
        types = [event.type async for event in stream]
        response = await stream.get_final_response()
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    assert response.output_text == "Ok."
    assert [item.name for item in response.output if item.type == "function_call"] == ["get_weather", "now"]


async def test_the_official_client_parses_a_format(client: openai.AsyncOpenAI, generator: Generator) -> None:
    generator.script = say(TOKENIZER, '{"name": "Ann"}')
    response = await client.responses.parse(model=MODEL, input="hello", text_format=Sailor)
    assert response.output_parsed == Sailor(name="Ann")
    assert generator.requests[0].params.grammar


async def test_every_response_can_be_sent_back(client: openai.AsyncOpenAI, generator: Generator) -> None:
    history: list[Any] = [{"role": "user", "content": "hello"}]
    for text in (ANSWER, CALL, "Ok.", "<tool_call>nope</tool_call>", "<think>Hm.", ""):
        for stream in (False, True):
            generator.script = say(TOKENIZER, text)
            response = await ask(client, input=history, stream=stream)
            if stream:
                response = [event async for event in response][-1].response
            items = [item.model_dump() for item in response.output]
            calls = [item["call_id"] for item in items if item["type"] == "function_call"]
            history += items
            history += [{"type": "function_call_output", "call_id": call, "output": "rain"} for call in calls]
            history.append({"role": "user", "content": "hello"})
    prompt = TOKENIZER.decode(generator.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.count('"name": "get_weather", "arguments": {"city": "Oslo"}') == 4
    assert prompt.count("rain") == 6


async def test_a_stream_that_fails_midway_says_so(client: openai.AsyncOpenAI, generator: Generator) -> None:
    tokens = TOKENIZER.encode("Ok")
    generator.script = lambda _: [TokenChunk((token,)) for token in tokens] + [NoWorkerError("No worker.")]
    events = [event async for event in await ask(client, stream=True)]
    assert [event.type for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
    assert events[-1].response.error.message == "No worker."


async def test_an_error_before_the_stream_has_its_status(client: openai.AsyncOpenAI, generator: Generator) -> None:
    generator.ready = False
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(client, stream=True)
    assert caught.value.status_code == 503


@pytest.mark.parametrize(
    ("fields", "param", "fragment"),
    [
        ({"store": True}, "store", "nothing is stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id is not supported"),
        ({"background": True}, "background", "background is not supported"),
        ({"conversation": "conv_1"}, "conversation", "conversation is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ({"input": "x" * 20_000}, "input", "but input has"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "must be an object with a schema"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "tools[0].name must be 1 to 128"),
        ({"extra_body": {"n": 2}}, "n", "n is a parameter of"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "text.format for a schema; other grammars"),
        ({"extra_body": {"made_up": 2}}, "made_up", "Unknown parameter"),
    ],
)
async def test_errors_name_the_parameters_of_this_api(
    client: openai.AsyncOpenAI, fields: dict[str, Any], param: str, fragment: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, **fields)
    assert caught.value.param == param
    assert fragment in str(caught.value)


@pytest.mark.parametrize("ignores", [False, True])
async def test_unknown_parameters_follow_the_configuration(generator: Generator, ignores: bool) -> None:
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(ignores_unknown=ignores))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        answer = await http.post("/v1/responses", json=MADE_UP)
    assert answer.status_code == (200 if ignores else 400)
    assert answer.headers.get("X-Baton-Ignored-Parameters") == ("made_up" if ignores else None)
