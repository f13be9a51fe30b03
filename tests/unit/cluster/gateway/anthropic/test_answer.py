"""Stream events and messages of fixed outputs."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from baton.core.errors import DeadlineError
from baton.core.request import FinishReason
from cluster.gateway.anthropic.answer import MessagesAnswer
from cluster.gateway.anthropic.content_blocks import ContentBlocks
from cluster.gateway.anthropic.schemas import MessagesRequest
from cluster.gateway.formats.base import Arguments, CallEnd, CallStart
from cluster.gateway.http_edge import JsonResponse
from cluster.gateway.openai.schemas import parse_request
from tests.unit.cluster.gateway.answer_streams import (
    BROKEN,
    OUTPUT,
    TEXTS,
    cuts,
    decoded,
    setting,
    streamed,
    whole,
)

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {
    "input_tokens": 4, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 0, "output_tokens": 7,
    "output_tokens_details": {"thinking_tokens": 3},
}  # fmt: skip
START = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
    "stop_sequence": None, "usage": USAGE,
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": START},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Ok."}},
    {"type": "content_block_stop", "index": 1},
    {"type": "content_block_start", "index": 2,
     "content_block": {"type": "tool_use", "id": "call_0", "name": "now", "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1}'}},
    {"type": "content_block_stop", "index": 2},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": USAGE},
    {"type": "message_stop"},
]  # fmt: skip
CONTENT = [
    {"type": "thinking", "thinking": "Hm.", "signature": ""},
    {"type": "text", "text": "Ok."},
    {"type": "tool_use", "id": "call_0", "name": "now", "input": {"a": 1}},
]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def new_answer(asked: int = 9, allowed: int = 9) -> MessagesAnswer:
    return MessagesAnswer(parse_request(MessagesRequest, {**HELLO, "max_tokens": asked}), setting("msg_1", allowed))


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with deltas that follow each other as one."""
    found: list[dict[str, Any]] = []
    for event in events:
        last = found[-1] if found else {}
        if event["type"] == last.get("type") == "content_block_delta" and event["index"] == last["index"]:
            (key,) = event["delta"].keys() - {"type"}
            last["delta"][key] += event["delta"][key]
        else:
            found.append(event)
    return found


def test_the_events_of_an_output_are_the_documented_ones() -> None:
    assert joined(streamed(new_answer(), [OUTPUT])) == EVENTS


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_events_have_the_types_of_the_official_client(text: str) -> None:
    for event in streamed(new_answer(), [text]):
        EVENT.validate_python(event)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_cuts_do_not_change_the_events(text: str, finish: FinishReason) -> None:
    expected = joined(streamed(new_answer(), [text], finish))
    for pieces in cuts(text):
        assert joined(streamed(new_answer(), pieces, finish)) == expected, pieces


def test_a_whole_message_has_the_content_of_the_stream() -> None:
    answer = whole(new_answer(), OUTPUT)
    Message.model_validate(answer)
    assert answer == {**START, "content": CONTENT, "stop_reason": "tool_use"}


@pytest.mark.parametrize(
    "text",
    [
        '{"n": 98765432109876543210}',
        '{"n": 1e999}',
        '{"n": "\\ud83d"}',
        f'{{"n": {"[" * 300}{"]" * 300}}}',
        f'{{"n": {"9" * 5000}}}',
    ],
    ids=["beyond 64 bits", "beyond floats", "half a character", "deep", "beyond Python"],
)
def test_arguments_are_answered_as_the_model_wrote_them(text: str) -> None:
    blocks = ContentBlocks(lambda: "call_0")
    for event in (CallStart("f"), Arguments(text), CallEnd()):
        blocks.add(event)
    expected = f'[{{"type":"tool_use","id":"call_0","name":"f","input":{text}}}]'
    assert JsonResponse(blocks.to_json()).body == expected.encode()


@pytest.mark.parametrize("text", ["[1]", '{"a": ', "NaN"])
def test_arguments_that_are_no_object_are_shown(text: str) -> None:
    blocks = ContentBlocks(lambda: "call_0")
    for event in (CallStart("f"), Arguments(text), CallEnd()):
        blocks.add(event)
    assert blocks.to_json()[0]["input"] == {"invalid_json": text}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "stop_string", "allowed", "reason"),
    [
        (FinishReason.STOP, "", 9, "end_turn"),
        (FinishReason.STOP, "END", 9, "stop_sequence"),
        (FinishReason.LENGTH, "", 9, "max_tokens"),
        (FinishReason.LENGTH, "", 8, "model_context_window_exceeded"),
    ],
)
def test_the_stop_reason_says_how_the_output_ended(
    stream: bool, finish: FinishReason, stop_string: str, allowed: int, reason: str
) -> None:
    answer = new_answer(allowed=allowed)
    if stream:
        found = streamed(answer, ["Ok."], finish, stop_string)[-2]["delta"]
    else:
        found = whole(answer, "Ok.", finish, stop_string)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, stop_string or None)


def test_a_complete_call_is_tool_use_whatever_ended_the_output() -> None:
    answer = whole(new_answer(), OUTPUT, FinishReason.STOP, "</tool_call>")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)


def test_a_call_that_breaks_is_text_of_a_whole_message_and_ends_in_a_stream() -> None:
    answer = whole(new_answer(), BROKEN)
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": BROKEN}], "end_turn")
    events = streamed(new_answer(), [BROKEN])
    blocks = [event["content_block"]["type"] for event in events if "content_block" in event]
    assert blocks == ["text", "tool_use", "text"]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"


def test_a_stream_that_fails_ends_with_an_error_in_anthropics_form() -> None:
    assert decoded([new_answer().failure(DeadlineError("It took too long."))]) == [
        {
            "type": "error",
            "error": {"type": "timeout_error", "message": "It took too long."},
            "request_id": "msg_1",
        }
    ]


def test_a_silent_stream_sends_pings() -> None:
    assert decoded([MessagesAnswer.heartbeat]) == [{"type": "ping"}]
