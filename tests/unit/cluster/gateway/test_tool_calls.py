"""Tool calls and reasoning over real HTTP, with the official client in front of a fake router."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.requests.generation import ModelCard
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, say, serve
from tests.unit.cluster.gateway.formats.agent_transcript import turn
from tests.unit.cluster.gateway.formats.chat_templates import QWEN
from tests.unit.cluster.gateway.formats.tool_tokenizers import SPECIAL, marked_tokenizer

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOKENIZER = marked_tokenizer(MARKS, SPECIAL, QWEN)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nOk.\n{CALL}\n{NOW}"


class Generator(FakeGenerator):
    @property
    def model(self) -> ModelCard:
        return dataclasses.replace(super().model, max_model_len=16_384)


@pytest.fixture
def generator() -> Generator:
    return Generator(TOKENIZER, say(TOKENIZER, ANSWER))


@pytest.fixture
async def client(generator: Generator) -> AsyncIterator[openai.AsyncOpenAI]:
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits())
    async with (
        serve(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "tools": TOOLS, **fields})


async def test_calls_reasoning_and_content_are_apart(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Ok."
    assert choice.message.reasoning_content == "Hm."
    first, second = choice.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("get_weather", '{"city": "Oslo"}')
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id
    assert first.type == "function"
    reasoning = len(TOKENIZER.encode("<think>\nHm.\n</think>"))
    assert answer.usage.completion_tokens_details.reasoning_tokens == reasoning


async def test_a_message_of_calls_alone_has_no_content(client: openai.AsyncOpenAI, generator: Generator) -> None:
    generator.script = say(TOKENIZER, CALL)
    (choice,) = (await ask(client)).choices
    assert choice.message.content is None
    assert not hasattr(choice.message, "reasoning_content")


async def test_streamed_deltas_have_the_official_shape(client: openai.AsyncOpenAI) -> None:
    chunks = [chunk async for chunk in await ask(client, stream=True, stream_options={"include_usage": True})]
    *news, last = chunks
    deltas = [chunk.choices[0].delta for chunk in news]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Ok."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls if call.id] == [(0, "get_weather"), (1, "now")]
    assert all(call.type == "function" for call in calls if call.id)
    joined = ["".join(call.function.arguments for call in calls if call.index == index) for index in range(2)]
    assert joined == ['{"city": "Oslo"}', "{}"]
    assert len([call for call in calls if call.index == 0]) > 5
    assert [chunk.choices[0].finish_reason for chunk in news] == [None] * (len(news) - 1) + ["tool_calls"]
    assert last.usage.completion_tokens_details.reasoning_tokens > 0


async def test_the_official_client_joins_the_stream(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=TOOLS) as stream:
        answer = await stream.get_final_completion()
    (choice,) = answer.choices
    assert choice.message.content == "Ok."
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["get_weather", "now"]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_and_logprobs(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await ask(client, n=2, logprobs=True, stream=stream)
    choices = [choice async for chunk in answer for choice in chunk.choices] if stream else answer.choices
    for index in range(2):
        own = [choice for choice in choices if choice.index == index]
        tokens = [entry.token for choice in own if choice.logprobs for entry in choice.logprobs.content]
        assert "".join(tokens).startswith(ANSWER)
        messages = [choice.delta if stream else choice.message for choice in own]
        ids = {call.id for message in messages for call in message.tool_calls or () if call.id}
        assert len(ids) == 2


async def test_a_stop_string_ends_the_output_before_the_call(client: openai.AsyncOpenAI) -> None:
    (choice,) = (await ask(client, stop=["<tool_call>"])).choices
    assert (choice.message.content, choice.finish_reason) == ("Ok.\n", "stop")
    (choice,) = (await ask(client, stop=["now"])).choices
    assert choice.message.content == 'Ok.<tool_call>{"name": "'
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_first_one_ends_the_output(
    client: openai.AsyncOpenAI, generator: Generator, stream: bool
) -> None:
    answer = await ask(client, parallel_tool_calls=False, stream=stream)
    choices = [choice async for chunk in answer for choice in chunk.choices] if stream else answer.choices
    messages = [choice.delta if stream else choice.message for choice in choices]
    names = [call.function.name for message in messages for call in message.tool_calls or () if call.function.name]
    assert names == ["get_weather"]
    assert choices[-1].finish_reason == "tool_calls"
    assert len(generator.cancelled) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["<tool_call>nope</tool_call>", '<tool_call>{"nome": "now"}</tool_call>'])
async def test_what_is_no_call_is_content(
    client: openai.AsyncOpenAI, generator: Generator, text: str, stream: bool
) -> None:
    generator.script = say(TOKENIZER, text)
    answer = await ask(client, stream=stream)
    choices = [choice async for chunk in answer for choice in chunk.choices] if stream else answer.choices
    messages = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(message.content or "" for message in messages) == text
    assert choices[-1].finish_reason == "stop"


async def test_a_call_that_is_cut_off_is_content(client: openai.AsyncOpenAI) -> None:
    num_tokens = len(TOKENIZER.encode(ANSWER.partition("Oslo")[0]))
    (choice,) = (await ask(client, max_tokens=num_tokens)).choices
    assert choice.finish_reason == "length"
    assert choice.message.content.endswith('"arguments": {"city": "')
    assert choice.message.tool_calls is None


async def test_without_tools_calls_are_text_without_their_marks(
    client: openai.AsyncOpenAI, generator: Generator
) -> None:
    (choice,) = (await ask(client, tool_choice="none")).choices
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert "get_weather" in choice.message.content
    assert "get_weather" not in TOKENIZER.decode(generator.requests[0].prompt_token_ids)
    assert choice.message.reasoning_content == "Hm."


async def test_every_answer_can_be_sent_back(client: openai.AsyncOpenAI, generator: Generator) -> None:
    messages = [*HELLO]
    for text in (ANSWER, CALL, "Ok.", "<tool_call>nope</tool_call>", "<think>Hm.", ""):
        generator.script = say(TOKENIZER, text)
        (choice,) = (await ask(client, messages=messages)).choices
        message = choice.message
        messages += [message.model_dump()]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls or ()]
        messages += HELLO
    prompt = TOKENIZER.decode(generator.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.count('"name": "get_weather", "arguments": {"city": "Oslo"}') == 2
    assert prompt.count("rain") == 3


async def test_reasoning_settings_reach_the_template(client: openai.AsyncOpenAI, generator: Generator) -> None:
    await ask(client, reasoning_effort="none")
    await ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    await ask(client)
    ends = [
        TOKENIZER.decode(request.prompt_token_ids, False).endswith("</think>\n\n") for request in generator.requests
    ]
    assert ends == [True, True, False]


async def test_forty_turns_of_a_coding_agent_are_accepted(client: openai.AsyncOpenAI, generator: Generator) -> None:
    messages: list[Any] = []
    for index in range(40):
        messages += turn(index)
        if index % 10 == 9:
            answer = await ask(client, messages=[*messages, *HELLO], parallel_tool_calls=True, tool_choice="auto")
            assert answer.choices[0].finish_reason == "tool_calls"
    prompt = TOKENIZER.decode(generator.requests[-1].prompt_token_ids)
    assert all(f"Step {index}" in prompt for index in range(40))
