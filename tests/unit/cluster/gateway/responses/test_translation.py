"""Requests of the Responses API as chats."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from cluster.gateway.openai.model_inputs import check_messages
from cluster.gateway.openai.schemas import ChatCompletionRequest, parse_request
from cluster.gateway.openai.tool_use import resolve_tools
from cluster.gateway.responses.schemas import ResponsesRequest
from cluster.gateway.responses.translation import to_chat

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "name": "now", "description": "The time", "parameters": {"type": "object"}, "strict": True}
FUNCTION = {key: value for key, value in TOOL.items() if key != "type"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now", "arguments": "{}", "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
MESSAGE = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "Ok.", "annotations": [], "logprobs": []}],
}  # fmt: skip
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def chat(**body: Any) -> ChatCompletionRequest:
    return to_chat(parse_request(ResponsesRequest, {"input": "hello", **body}))


def messages(*items: Any, **body: Any) -> list[dict[str, Any]]:
    return chat(input=list(items), **body).messages


def test_text_is_a_message_of_the_user() -> None:
    assert chat().messages == [USER]
    assert chat(instructions="Be brief.").messages == [{"role": "system", "content": "Be brief."}, USER]


def test_parameters_have_their_counterparts() -> None:
    given: dict[str, Any] = {"model": "m", "temperature": 0.5, "top_p": 0.25, "stream": True, "service_tier": "flex"}
    extensions: dict[str, Any] = {"seed": 3, "top_k": 5, "cache_salt": "s", "chat_template_kwargs": {"a": 1}}
    found = chat(max_output_tokens=9, reasoning={"effort": "low"}, parallel_tool_calls=False, **given, **extensions)
    assert {name: getattr(found, name) for name in given | extensions} == given | extensions
    assert (found.max_completion_tokens, found.reasoning_effort, found.parallel_tool_calls) == (9, "low", False)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}},
        ),
    ],
)
def test_formats_are_those_of_chats(wanted: Any, expected: Any) -> None:
    assert chat(text={"format": wanted, "verbosity": "medium"}).response_format == expected


@pytest.mark.parametrize(
    ("choice", "names", "is_required"),
    [
        (None, ["now", "then"], False),
        ("auto", ["now", "then"], False),
        ("none", [], False),
        ("required", ["now", "then"], True),
        ({"type": "function", "name": "then"}, ["then"], True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, ["now"], False),
    ],
)
def test_tools_and_choices_are_those_of_chats(choice: Any, names: list[str], is_required: bool) -> None:
    found = chat(tools=[TOOL, {**TOOL, "name": "then", "strict": None, "defer_loading": False}], tool_choice=choice)
    assert (found.tools or [])[0] == {"type": "function", "function": FUNCTION}
    use = resolve_tools(found)
    assert ([function.name for function in use.functions], use.is_required) == (names, is_required)


def test_an_assistants_turn_is_one_message() -> None:
    assert messages(USER, REASONING, MESSAGE, CALL, {**CALL, "call_id": "c2"}, OUTPUT, REASONING, MESSAGE, USER) == [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Ok.",
         "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Ok."},
        USER,
    ]  # fmt: skip


def test_what_a_client_adds_to_a_call_is_accepted() -> None:
    assert messages({**CALL, "parsed_arguments": {"a": 1}}) == messages(CALL)


@pytest.mark.parametrize("nothing", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_null_is_absent_and_hints_are_accepted(nothing: dict[str, Any]) -> None:
    hints = {"cache_control": {"type": "ephemeral"}, "annotations": [], "id": None}
    assert messages({"role": "user", **nothing, **hints}) == [{"role": "user", "content": ""}]
    assert messages({**USER, "name": "Ann"}) == [{**USER, "name": "Ann"}]
    for absent in ({}, {"arguments": None}):
        call = {key: value for key, value in CALL.items() if key != "arguments"}
        (found,) = messages({**call, **absent})
        assert found["tool_calls"][0]["function"]["arguments"] == ""
    assert messages(CALL, {**OUTPUT, "output": None})[1]["content"] == ""


def test_text_behind_a_call_stays_before_its_output() -> None:
    """A tool's output must follow the message with the call."""
    assert messages(CALL, MESSAGE, OUTPUT) == [
        {"role": "assistant", "tool_calls": [CHAT_CALL], "content": "Ok."},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]


def test_messages_without_calls_stay_apart() -> None:
    assert [message["content"] for message in messages(MESSAGE, MESSAGE, USER, USER)] == [
        "Ok.",
        "Ok.",
        "hello",
        "hello",
    ]


def test_system_messages_at_the_beginning_are_one() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "b"}]}
    assert messages(developer, USER, developer, instructions="a") == [
        {"role": "system", "content": "a\n\nb"}, USER, {"role": "developer", "content": "b"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("item", "content"),
    [
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            "a\nb",
        ),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]}, "a"),
        ({"role": "assistant", "content": "a", "phase": "final_answer"}, "a"),
    ],
)
def test_contents_are_text(item: Any, content: str) -> None:
    (message,) = messages(item)
    assert message["content"] == content


def test_reasoning_may_be_a_summary_or_nothing() -> None:
    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "So."}]}
    assert messages(summary)[0]["reasoning_content"] == "So."
    assert messages(USER, {"type": "reasoning", "id": "r", "summary": []}) == [USER]


def test_translated_messages_pass_the_checks_of_chats() -> None:
    found = messages(USER, REASONING, MESSAGE, CALL, OUTPUT, REASONING, CALL, OUTPUT, USER, instructions="a")
    assert len(check_messages(found)) == len(found)


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "nothing is stored"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}]}, "encrypted"),
        ({"input": [{**CALL, "namespace": "x"}]}, "input[0].namespace"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "file_search"}}, "file_search"),
        ({"text": {"format": {"type": "grammar"}}}, "grammar"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"include": ["message.output_text.logprobs"]}, "/v1/chat/completions"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: Any, fragment: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        chat(**body)
    assert fragment in caught.value.message
    assert caught.value.message.startswith(f"{caught.value.param} ")
    assert caught.value.param.startswith(next(iter(body)))


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": 5},
        {"input": [5]},
        {"input": ["a"]},
        {"input": [{"role": "tool", "content": "a"}]},
        {"input": [{"role": "user", "content": 5}]},
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        {"input": [{"role": "user", "content": [5]}]},
        {"input": [{**CALL, "call_id": ""}]},
        {"input": [{**CALL, "arguments": {}}]},
        {"input": [{**OUTPUT, "output": 5}]},
        {"input": [USER] * 8193},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 8192}]},
        {"tools": [5]},
        {"tool_choice": "any"},
        {"tool_choice": ["auto"]},
        {"tool_choice": 5},
        {"tool_choice": {"type": "function"}},
        {"tool_choice": {"type": "allowed_tools", "tools": 5}},
        {"text": {"format": 5}},
        {"reasoning": {"effort": "enormous"}},
        {"include": ["made_up"]},
    ],
)
def test_what_is_malformed_is_refused_with_its_place(body: Any) -> None:
    (name,) = body
    with pytest.raises(InvalidRequestError, match=name) as caught:
        chat(**body)
    assert caught.value.message.startswith(f"{caught.value.param} ")
    assert caught.value.param.startswith(name)


def test_a_wrong_choice_is_told_the_forms_of_this_api() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(tools=[TOOL], tool_choice="any")
    right = {"type": "function", "name": TOOL["name"]}
    assert '{"type": "function", "name": …}' in caught.value.message
    assert chat(tools=[TOOL], tool_choice=right).tool_choice


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"role": "user", "content": {}}, "input[0].content"),
        ({"type": "function_call_output", "call_id": "c", "output": {}}, "input[0].output"),
    ],
)
def test_content_of_a_wrong_type_is_told_what_it_may_be(item: Any, place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(input=[item])
    assert caught.value.message == f"{place} must be a string or an array of parts, got an object."


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"tools": [{"type": "function", "function": {"name": "now"}}]}, "'function'; write its keys beside 'type'"),
        ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "write its keys beside 'type'"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema is for the type 'json_schema'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "write its keys beside 'type'",
        ),
    ],
)
def test_keys_in_the_form_of_chats_are_told_their_place(body: Any, hint: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**body)
    assert hint in caught.value.message
