"""Requests in Anthropic's form as chats."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from cluster.gateway.anthropic.schemas import MessagesRequest, PromptRequest
from cluster.gateway.anthropic.translation import to_chat, to_counted_chat
from cluster.gateway.openai.model_inputs import check_messages
from cluster.gateway.openai.schemas import ChatCompletionRequest, parse_request
from cluster.gateway.openai.tool_use import resolve_tools

USER = {"role": "user", "content": "hello"}
TOOL = {"name": "now", "description": "The time", "input_schema": {"type": "object"}, "strict": True}
CACHED = {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "Ok.", **CACHED}
THINKING = {"type": "thinking", "thinking": "Hm.", "signature": ""}
USE = {"type": "tool_use", "id": "c1", "name": "now", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "noon"}], **CACHED}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}


def chat(**body: Any) -> ChatCompletionRequest:
    return to_chat(parse_request(MessagesRequest, {"messages": [USER], "max_tokens": 9, **body}))


def messages(*given: Any, **body: Any) -> list[dict[str, Any]]:
    return chat(messages=list(given), **body).messages


def test_the_system_prompt_is_the_first_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert chat().messages == [USER]
    assert chat(system="Be brief.").messages == [system, USER]
    assert chat(system=[{"type": "text", "text": "Be brief.", **CACHED}]).messages == [system, USER]


def test_parameters_have_their_counterparts() -> None:
    given: dict[str, Any] = {"model": "m", "temperature": 0.5, "top_p": 0.25, "top_k": 5, "stream": True, "seed": 3}
    found = chat(stop_sequences=["END"], service_tier="standard_only", **given)
    assert {name: getattr(found, name) for name in given} == given
    assert (found.max_tokens, found.stop, found.service_tier) == (9, ["END"], "default")


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive", "display": "summarized"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking_is_a_setting_of_the_template(thinking: Any, expected: Any) -> None:
    assert chat(thinking=thinking).chat_template_kwargs == expected


def test_the_output_config_has_effort_and_format() -> None:
    found = chat(output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert found.reasoning_effort == "max"
    assert found.response_format == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("choice", "is_required", "is_single"),
    [
        (None, False, False),
        ({"type": "auto"}, False, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, True),
        ({"type": "any"}, True, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "now"}, True, True),
    ],
)
def test_tools_and_choices_are_those_of_chats(choice: Any, is_required: bool, is_single: bool) -> None:
    found = chat(tools=[TOOL | CACHED, {"type": "custom", "name": "then", "input_schema": {}}], tool_choice=choice)
    function = {"name": "now", "description": "The time", "strict": True, "parameters": {"type": "object"}}
    assert (found.tools or [])[0] == {"type": "function", "function": function}
    use = resolve_tools(found)
    assert (use.is_required, use.is_single) == (is_required, is_single)


def test_without_a_choice_of_tools_none_may_be_used() -> None:
    assert not resolve_tools(chat(tools=[TOOL], tool_choice={"type": "none"})).functions


def test_blocks_become_messages_in_their_order() -> None:
    assert messages(
        USER,
        {"role": "assistant", "content": [THINKING, TEXT, USE]},
        {"role": "user", "content": [RESULT, TEXT, TEXT]},
    ) == [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Ok.", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "user", "content": "Ok.\nOk."},
    ]


def test_a_result_that_is_an_error_says_so() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "is_error": True}
    contents = [messages({"role": "user", "content": [{**result, **fields}]})[0]["content"]
                for fields in ({}, {"content": "no"}, {"content": "Error: no"})]  # fmt: skip
    assert contents == ["Error: ", "Error: no", "Error: no"]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    assert not chat().continue_final_message
    assert chat(messages=[USER, {"role": "assistant", "content": "The best"}]).continue_final_message
    with pytest.raises(InvalidRequestError, match="ends with a tool_use"):
        chat(messages=[USER, {"role": "assistant", "content": [USE]}])


def test_translated_messages_pass_the_checks_of_chats() -> None:
    found = messages(
        USER, {"role": "assistant", "content": [THINKING, USE]}, {"role": "user", "content": [RESULT]},
        {"role": "assistant", "content": [TEXT]}, {"role": "user", "content": []}, system="a",
    )  # fmt: skip
    assert len(check_messages(found)) == len(found)


def test_a_counted_prompt_is_that_of_a_message() -> None:
    body = {"messages": [USER], "system": "a", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = to_counted_chat(parse_request(PromptRequest, body))
    asked = chat(**body)
    for name in ("messages", "tools", "chat_template_kwargs"):
        assert getattr(counted, name) == getattr(asked, name)


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "tool_use"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "encrypted"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{**TEXT, "citations": [{}]}]}]}, "citations"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"thinking": {"type": "between_tools"}}, "between_tools"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"task_budget": {}}}, "task_budget"),
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
        {"messages": 5},
        {"messages": []},
        {"messages": [5]},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{**RESULT, "tool_use_id": ""}]}]},
        {"messages": [{"role": "user", "content": [{**RESULT, "is_error": "x"}]}]},
        {"messages": [{"role": "assistant", "content": [{**USE, "input": "{}"}]}]},
        {"messages": [USER] * 8193},
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [TEXT] * 8192}]}]},
        {"system": 5},
        {"tools": [5]},
        {"tools": [{"name": "now"}]},
        {"tool_choice": {"type": "some"}},
        {"tool_choice": {"type": "tool"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        {"thinking": {"type": "enabled"}},
        {"output_config": {"effort": "enormous"}},
    ],
)
def test_what_is_malformed_is_refused_with_its_place(body: Any) -> None:
    (name,) = body
    with pytest.raises(InvalidRequestError, match=name) as caught:
        chat(**body)
    assert caught.value.message.startswith(f"{caught.value.param} ")
    assert caught.value.param.startswith(name)


@pytest.mark.parametrize(
    ("body", "place", "found"),
    [
        ({"messages": [USER, {"role": "assistant", "content": 5}]}, "messages[1].content", "an integer"),
        ({"messages": [{"role": "user", "content": TEXT}]}, "messages[0].content", "an object"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": 5}]}]}, "messages[0].content[0].content",
         "an integer"),
        ({"system": 5}, "system", "an integer"),
    ],
)  # fmt: skip
def test_content_of_a_wrong_type_is_told_what_it_may_be(body: Any, place: str, found: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**body)
    assert caught.value.message == f"{place} must be a string or an array of blocks, got {found}."


@pytest.mark.parametrize("nothing", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_null_is_absent_and_hints_are_accepted(nothing: dict[str, Any]) -> None:
    for role in ("user", "assistant"):
        assert messages({"role": role, **nothing, **CACHED}, USER)[0] == {"role": role, "content": ""}
    call = {"type": "tool_use", "id": "c", "name": "now", "input": None}
    found, _ = messages({"role": "assistant", "content": [call]}, USER)
    assert found["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("kind", ["any", "auto", "none"])
def test_only_a_choice_of_a_tool_has_a_name(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="Unknown key in tool_choice: 'name'") as caught:
        chat(tools=[TOOL], tool_choice={"type": kind, "name": "now"})
    assert caught.value.param == "tool_choice.name"


def test_parameters_of_a_tool_are_called_input_schema() -> None:
    with pytest.raises(InvalidRequestError, match="send it as 'input_schema'"):
        chat(tools=[{"name": "now", "parameters": {}}])
