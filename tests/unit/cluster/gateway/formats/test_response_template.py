"""Outputs of tokenizers that describe their form in transformers' ``response_template``."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import UnsupportedParameterError
from cluster.gateway.formats.base import CallRule, OutputParser
from cluster.gateway.formats.dialect import Dialect
from tests.unit.cluster.gateway.formats.chat_templates import QWEN
from tests.unit.cluster.gateway.formats.samples import FUNCTIONS, parsed, whole
from tests.unit.cluster.gateway.formats.tool_tokenizers import SPECIAL, marked_tokenizer

TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
CALL = '<call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</call>'


def dialect(tool_parser: str = "auto", chat_template: str | None = None) -> Dialect:
    tokenizer = marked_tokenizer(("<call>", "</call>", "<think>", "</think>"), SPECIAL, chat_template)
    tokenizer._hf.response_template = TEMPLATE
    return Dialect(tokenizer, tool_parser)


def parser(prompt: str = PROMPT) -> OutputParser:
    return dialect().parser(FUNCTIONS, prompt)


@pytest.mark.parametrize(
    ("text", "prompt", "content", "reasoning", "names"),
    [
        (f"<think>Hm.</think>Ok.{CALL}{CALL}", PROMPT, "Ok.", "Hm.", ["get_weather", "get_weather"]),
        ("Hm.</think>Ok.", PROMPT + "<think>", "Ok.", "Hm.", []),
        ("Ok.", PROMPT, "Ok.", "", []),
        ("Ok.<call>{broken}</call> More.", PROMPT, "Ok.<call>{broken}</call> More.", "", []),
        ("Ok.<call>[1]</call>", PROMPT, "Ok.<call>[1]</call>", "", []),
        (f"{CALL}<call>{{", PROMPT, "<call>{", "", ["get_weather"]),
    ],
)
def test_the_message_does_not_depend_on_the_cuts(
    text: str, prompt: str, content: str, reasoning: str, names: list[str]
) -> None:
    for cut in range(len(text) + 1):
        message = whole(parsed(parser(prompt), [text[:cut], text[cut:]]))
        assert (message["content"] or "") == content
        assert message.get("reasoning_content", "") == reasoning
        assert [call["function"]["name"] for call in message.get("tool_calls", ())] == names


def test_a_closing_mark_that_is_cut_off_is_no_content() -> None:
    text = f"Ok.{CALL}"
    for end in range(len(text) - len("</call>"), len(text) + 1):
        for pieces in ([text[:end]], list(text[:end])):
            message = whole(parsed(parser(), pieces))
            assert (message["content"], len(message["tool_calls"])) == ("Ok.", 1)


def test_a_stop_string_that_is_shown_completes_no_call() -> None:
    found = parser()
    before = '<call>{"name": "now", "arguments": {}'
    message = whole(found.push(before) + found.finish("}", shown="}"))
    assert (message["content"], "tool_calls" in message) == (before + "}", False)


def test_arguments_are_json_of_the_schema_s_types() -> None:
    message = whole(parsed(parser(), ['<call>{"name": "get_weather", "arguments": {"city": "a", "days": "3"}}</call>']))
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "a", "days": 3}'


def test_all_special_tokens_reach_the_parser() -> None:
    tokens = dialect()._tokenizer
    assert dialect().shown_token_ids() == tokens.special_ids
    assert dialect("hermes").shown_token_ids() < tokens.special_ids


def test_calls_of_an_unknown_form_cannot_be_required() -> None:
    rule = CallRule(FUNCTIONS, True, False)
    with pytest.raises(UnsupportedParameterError, match=r"router\.tool_parser"):
        dialect().grammar(rule, "", PROMPT)
    assert "tool_call" in dialect("hermes").grammar(rule, "", PROMPT)


def test_constrained_outputs_have_the_form_of_the_chat_template() -> None:
    found = dialect(chat_template=QWEN)
    assert "tool_call" in found.grammar(CallRule(FUNCTIONS, True, False), "", PROMPT)
    parser = found.parser(FUNCTIONS, PROMPT, is_constrained=True)
    message = whole(parsed(parser, ['<tool_call>{"name": "now"}</tool_call>']))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
