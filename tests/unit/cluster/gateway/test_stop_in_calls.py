"""A stop string within a call: streams and whole answers agree, and the call is content."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest

from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from tests.unit.cluster.fakes import MODEL, FakeAdmin, say, serve
from tests.unit.cluster.gateway.test_tool_calls import CALL, HELLO, NOW, TOKENIZER, TOOLS, Generator

CUT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALLED = ("get_weather", '{"city": "Oslo"}')


@pytest.fixture
def generator() -> Generator:
    return Generator(TOKENIZER, say(TOKENIZER, CALL))


@pytest.fixture
async def url(generator: Generator) -> AsyncIterator[str]:
    async with serve(create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits())) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def chat(client: openai.AsyncOpenAI, *, stream: bool, **fields: Any) -> list[tuple[str, list[Any], str]]:
    """Content, calls and finish reason of each choice."""
    answer: Any = await client.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "tools": TOOLS, "stream": stream, **fields}
    )
    choices = [choice async for chunk in answer for choice in chunk.choices] if stream else answer.choices
    found: dict[int, list[Any]] = {}
    for choice in choices:
        content, calls, _ = found.setdefault(choice.index, ["", {}, None])
        message = choice.delta if stream else choice.message
        for place, call in enumerate(message.tool_calls or ()):
            joined = calls.setdefault(call.index if stream else place, ["", ""])
            joined[0] += call.function.name or ""
            joined[1] += call.function.arguments or ""
        found[choice.index] = [content + (message.content or ""), calls, choice.finish_reason]
    return [
        (content, list(map(tuple, calls.values())), reason) for _, (content, calls, reason) in sorted(found.items())
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tool_choice", "n"), [("auto", 1), ("required", 1), (NAMED, 1), ("required", 3)])
async def test_a_stop_string_within_a_call_makes_it_content(
    client: openai.AsyncOpenAI, stream: bool, tool_choice: Any, n: int
) -> None:
    found = await chat(client, stream=stream, stop=["Oslo"], tool_choice=tool_choice, n=n)
    assert found == [(CUT, [], "stop")] * n


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "content", "calls"),
    [
        ("Oslo", CUT + "Oslo", []),
        ('Oslo"}}\n</tool_call>', CUT + 'Oslo"}}\n</tool_call>', []),
        ("<tool_call>", "<tool_call>", []),
        (CALL, CALL, []),
        ("</tool_call>", "", [CALLED]),
    ],
)
async def test_a_stop_string_that_is_shown_completes_no_call(
    client: openai.AsyncOpenAI, stream: bool, stop: str, content: str, calls: list[Any]
) -> None:
    ((shown, *rest),) = await chat(client, stream=stream, stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert (shown, rest) == (content, [calls, "tool_calls" if calls else "stop"])
    ((_, *without),) = await chat(client, stream=stream, stop=[stop])
    assert rest == without


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_before_the_stop_string_remain(
    client: openai.AsyncOpenAI, generator: Generator, stream: bool
) -> None:
    generator.script = say(TOKENIZER, f"{CALL}\n{NOW}")
    found = await chat(client, stream=stream, stop=["now"], tool_choice="required")
    assert found == [('<tool_call>{"name": "', [CALLED], "tool_calls")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_that_does_not_occur_leaves_the_calls(client: openai.AsyncOpenAI, stream: bool) -> None:
    assert await chat(client, stream=stream, stop=["Rome"]) == [("", [CALLED], "tool_calls")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_model_breaks_is_no_reason_to_call(
    client: openai.AsyncOpenAI, generator: Generator, stream: bool
) -> None:
    generator.script = say(TOKENIZER, '<tool_call>{"name": "now", "arguments": {"x": y}}')
    ((_, _, reason),) = await chat(client, stream=stream)
    assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_the_call_as_text(claude: anthropic.AsyncAnthropic, stream: bool) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 500,
        "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "stop_sequences": ["Oslo"],
    }
    if stream:
        async with claude.messages.stream(**fields) as messages:
            answer = await messages.get_final_message()
    else:
        answer = await claude.messages.create(**fields)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": CUT}]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Oslo")
