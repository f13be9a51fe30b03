"""Outputs of tokenizers that describe their form in transformers' ``response_template``."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.gateway.formats.base import OutputParser
from cluster.gateway.formats.dialect import Dialect
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


def dialect(tool_parser: str = "auto") -> Dialect:
    tokenizer = marked_tokenizer(("<call>", "</call>", "<think>", "</think>"), SPECIAL)
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


def test_arguments_are_json_of_the_schema_s_types() -> None:
    message = whole(parsed(parser(), ['<call>{"name": "get_weather", "arguments": {"city": "a", "days": "3"}}</call>']))
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "a", "days": 3}'


def test_all_special_tokens_reach_the_parser() -> None:
    tokens = dialect()._tokenizer
    assert dialect().shown_token_ids() == tokens.special_ids
    assert dialect("hermes").shown_token_ids() < tokens.special_ids
