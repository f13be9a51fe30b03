"""Tests of the APIs that are translated to chats, with their official clients. A module with a cluster runs them."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.running_cluster import MODEL, RunningCluster

QUESTION = "What is the capital of France?"
ASK_WEATHER = "What will the weather be in Oslo?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


class Captain(BaseModel):
    name: str = Field(max_length=20)
    rank: Literal["captain", "admiral"]


class ResponsesApi:
    @pytest.fixture
    def ask(self, cluster: RunningCluster) -> Any:
        client = OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=0)
        return client.responses

    def test_whole_and_streamed_responses_are_equal(self, ask: Any) -> None:
        fields: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": 20, "temperature": 0}
        whole = ask.create(**fields)
        assert "Paris" in whole.output_text
        assert (whole.status, whole.store) == ("completed", False)
        with ask.stream(**fields) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            last = stream.get_final_response()
        assert "".join(deltas) == last.output_text == whole.output_text
        assert last.usage.output_tokens == whole.usage.output_tokens

    def test_a_bound_makes_a_response_incomplete(self, ask: Any) -> None:
        response = ask.create(model=MODEL, input=QUESTION, max_output_tokens=2, temperature=0)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.usage.output_tokens == 2

    def test_formats_are_parsed(self, ask: Any) -> None:
        response = ask.parse(
            model=MODEL, input="Invent a sailor.", text_format=Captain, max_output_tokens=100, temperature=0
        )
        assert response.output_parsed.rank in ("captain", "admiral")

    def test_a_required_call_and_its_output_go_back(self, ask: Any) -> None:
        tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
        history: list[Any] = [{"role": "user", "content": ASK_WEATHER}]
        fields: dict[str, Any] = {"model": MODEL, "tools": [tool], "temperature": 0, "max_output_tokens": 60}
        response = ask.create(input=history, tool_choice="required", parallel_tool_calls=False, **fields)
        [call] = response.output
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "It will be snowing in Oslo."}
        answer = ask.create(input=[*history, *response.output, output], **fields)
        assert "snow" in answer.output_text


class MessagesApi:
    @pytest.fixture
    def ask(self, cluster: RunningCluster) -> Any:
        return Anthropic(base_url=cluster.endpoint, api_key="none", max_retries=0).messages

    def test_whole_and_streamed_messages_are_equal(self, ask: Any) -> None:
        fields: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
        greedy = {**fields, "max_tokens": 20, "extra_body": {"temperature": 0}}
        whole = ask.create(**greedy)
        assert "Paris" in whole.content[0].text
        assert whole.stop_reason == "end_turn"
        with ask.stream(**greedy) as stream:
            texts = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert texts == last.content[0].text == whole.content[0].text
        counted = ask.count_tokens(**fields).input_tokens
        for usage in (whole.usage, last.usage):
            assert usage.input_tokens + usage.cache_read_input_tokens == counted

    def test_stop_sequences_and_bounds_are_told(self, ask: Any) -> None:
        messages: Any = [{"role": "user", "content": QUESTION}]
        greedy: dict[str, Any] = {"model": MODEL, "messages": messages, "extra_body": {"temperature": 0}}
        stopped = ask.create(**greedy, max_tokens=60, stop_sequences=["Rome", "aris"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "aris")
        assert ask.create(**greedy, max_tokens=2).stop_reason == "max_tokens"

    def test_formats_are_parsed(self, ask: Any) -> None:
        message = ask.parse(
            model=MODEL, max_tokens=100, output_format=Captain, extra_body={"temperature": 0},
            messages=[{"role": "user", "content": "Invent a sailor."}],
        )  # fmt: skip
        assert message.parsed_output.rank in ("captain", "admiral")

    def test_a_required_tool_use_and_its_result_go_back(self, ask: Any) -> None:
        tool = {"name": "get_weather", "input_schema": SCHEMA, "strict": True}
        history: list[Any] = [{"role": "user", "content": ASK_WEATHER}]
        fields: dict[str, Any] = {"model": MODEL, "tools": [tool], "max_tokens": 60, "extra_body": {"temperature": 0}}
        with ask.stream(messages=history, tool_choice={"type": "tool", "name": "get_weather"}, **fields) as stream:
            message = stream.get_final_message()
        [use] = message.content
        assert message.stop_reason == "tool_use"
        jsonschema.validate(use.input, SCHEMA)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "It will be snowing in Oslo."}
        history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        assert "snow" in ask.create(messages=history, **fields).content[0].text
