"""Stream events and response objects of fixed outputs."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.core.errors import NoWorkerError, OverloadedError
from baton.core.request import FinishReason
from cluster.gateway.openai.schemas import parse_request
from cluster.gateway.responses.answer import ResponsesAnswer
from cluster.gateway.responses.schemas import ResponsesRequest
from tests.unit.cluster.gateway.answer_streams import (
    BROKEN,
    CUT_OFF,
    OUTPUT,
    TEXTS,
    USAGE,
    cuts,
    decoded,
    deltas,
    setting,
    streamed,
    whole,
)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
REASONING = {
    "id": "rs_1_0", "type": "reasoning", "status": "completed", "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}  # fmt: skip
PART = {"type": "output_text", "text": "Ok.", "annotations": [], "logprobs": []}
MESSAGE = {"id": "msg_1_1", "type": "message", "status": "completed", "role": "assistant", "content": [PART]}
CALL = {
    "id": "fc_1_2", "type": "function_call", "status": "completed", "call_id": "call_0", "name": "now",
    "arguments": '{"a": 1}',
}  # fmt: skip
BEGUN = {"status": "in_progress"}
EVENTS: list[dict[str, Any]] = [
    {"type": "response.created"},
    {"type": "response.in_progress"},
    {"type": "response.output_item.added", "output_index": 0, "item": {**REASONING, **BEGUN, "content": []}},
    {"type": "response.content_part.added", "output_index": 0, "item_id": "rs_1_0", "content_index": 0,
     "part": {"type": "reasoning_text", "text": ""}},
    {"type": "response.reasoning_text.delta", "output_index": 0, "item_id": "rs_1_0", "content_index": 0,
     "delta": "Hm."},
    {"type": "response.reasoning_text.done", "output_index": 0, "item_id": "rs_1_0", "content_index": 0, "text": "Hm."},
    {"type": "response.content_part.done", "output_index": 0, "item_id": "rs_1_0", "content_index": 0,
     "part": {"type": "reasoning_text", "text": "Hm."}},
    {"type": "response.output_item.done", "output_index": 0, "item": REASONING},
    {"type": "response.output_item.added", "output_index": 1, "item": {**MESSAGE, **BEGUN, "content": []}},
    {"type": "response.content_part.added", "output_index": 1, "item_id": "msg_1_1", "content_index": 0,
     "part": {**PART, "text": ""}},
    {"type": "response.output_text.delta", "output_index": 1, "item_id": "msg_1_1", "content_index": 0, "delta": "Ok.",
     "logprobs": []},
    {"type": "response.output_text.done", "output_index": 1, "item_id": "msg_1_1", "content_index": 0, "text": "Ok.",
     "logprobs": []},
    {"type": "response.content_part.done", "output_index": 1, "item_id": "msg_1_1", "content_index": 0, "part": PART},
    {"type": "response.output_item.done", "output_index": 1, "item": MESSAGE},
    {"type": "response.output_item.added", "output_index": 2, "item": {**CALL, **BEGUN, "arguments": ""}},
    {"type": "response.function_call_arguments.delta", "output_index": 2, "item_id": "fc_1_2", "delta": '{"a": 1}'},
    {"type": "response.function_call_arguments.done", "output_index": 2, "item_id": "fc_1_2", "name": "now",
     "arguments": '{"a": 1}'},
    {"type": "response.output_item.done", "output_index": 2, "item": CALL},
    {"type": "response.completed"},
]  # fmt: skip


def new_answer(**fields: Any) -> ResponsesAnswer:
    return ResponsesAnswer(parse_request(ResponsesRequest, {"input": "hello", **fields}), setting("resp_1"))


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with deltas that follow each other as one, and without times and numbers, after checking these."""
    found: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        assert event.pop("sequence_number") == number
        if "response" in event:
            del event["response"]["created_at"], event["response"]["completed_at"]
        if found and event["type"].endswith(".delta") and found[-1]["type"] == event["type"]:
            found[-1]["delta"] += event["delta"]
        else:
            found.append(event)
    return found


def test_the_events_of_an_output_are_the_documented_ones() -> None:
    events = joined(streamed(new_answer(), [OUTPUT]))
    states = [event.pop("response") for event in events if "response" in event]
    assert events == EVENTS
    assert [(state["status"], state["output"]) for state in states] == [
        ("in_progress", []), ("in_progress", []), ("completed", [REASONING, MESSAGE, CALL]),
    ]  # fmt: skip
    assert [state["usage"] for state in states[:2]] == [None, None]
    assert states[2]["usage"] == {
        "input_tokens": USAGE.prompt_tokens,
        "input_tokens_details": {"cached_tokens": USAGE.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": USAGE.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": USAGE.reasoning_tokens},
        "total_tokens": USAGE.prompt_tokens + USAGE.completion_tokens,
    }


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


@pytest.mark.parametrize("text", [text for name, text in TEXTS.items() if "that" not in name and "broken" not in name])
def test_a_stream_ends_with_the_answer_that_is_not_streamed(text: str) -> None:
    answer = whole(new_answer(), text)
    Response.model_validate(answer)
    last = streamed(new_answer(), list(text))[-1]["response"]
    for response in (answer, last):
        del response["created_at"], response["completed_at"]
    assert answer == last


def test_an_output_that_ends_at_the_bound_is_incomplete() -> None:
    *_, done, last = streamed(new_answer(max_output_tokens=9), ["<think>Hm"], FinishReason.LENGTH)
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert last["type"] == "response.incomplete"
    response = last["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"] == [done["item"]]
    assert whole(new_answer(), "Ok", FinishReason.LENGTH)["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("text", [BROKEN, CUT_OFF])
def test_a_call_that_breaks_is_text_of_a_whole_answer_and_incomplete_in_a_stream(text: str) -> None:
    (message,) = whole(new_answer(), text)["output"]
    assert message["content"][0]["text"] == text
    items = streamed(new_answer(), list(text))[-1]["response"]["output"]
    (call,) = [item for item in items if item["type"] == "function_call"]
    assert call["status"] == "incomplete"
    assert call["arguments"] in text


def test_a_stream_that_fails_ends_with_the_error_and_the_response() -> None:
    answer = new_answer()
    sent = answer.events(0, next(deltas(["Ok"], FinishReason.STOP)), lambda: USAGE)
    *_, done, error, last = decoded([*sent, answer.failure(NoWorkerError("No worker."))])
    assert done["item"]["status"] == "incomplete"
    assert error == {
        "type": "error", "code": "no_worker_available", "message": "No worker.", "param": None,
        "sequence_number": last["sequence_number"] - 1,
    }  # fmt: skip
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "No worker."}
    assert (last["response"]["status"], last["response"]["output"]) == ("failed", [done["item"]])


def test_a_stream_that_fails_before_its_first_event_tells_of_the_response_first() -> None:
    events = decoded([new_answer().failure(OverloadedError("Full.", retry_after_s=1.0))])
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "error", "response.failed",
    ]  # fmt: skip
    assert events[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_the_answer_repeats_the_request() -> None:
    tool = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True}
    asked = {
        "instructions": "Be brief.", "max_output_tokens": 9, "metadata": {"a": "b"}, "parallel_tool_calls": False,
        "temperature": 0.5, "top_p": 0.25, "tool_choice": "required", "tools": [tool],
    }  # fmt: skip
    answer = whole(new_answer(**asked, reasoning={"effort": "low", "summary": "auto"}), "Ok.")
    assert {name: answer[name] for name in asked} == asked
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert (answer["store"], answer["background"], answer["previous_response_id"]) == (False, False, None)
