"""Every row of the tables of parameters, against the parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import BatonError, InvalidRequestError, UnsupportedParameterError
from cluster.gateway.anthropic.parameter_table import COUNT_TOKENS, MESSAGES
from cluster.gateway.anthropic.schemas import MessagesRequest, PromptRequest
from cluster.gateway.openai.parameter_table import PARAMETERS, endpoints_of
from cluster.gateway.openai.parameters import CHAT, COMPLETIONS, Parameter
from cluster.gateway.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    RequestSchema,
    parse_request,
    without_unknown,
)
from cluster.gateway.responses.parameter_table import RESPONSES
from cluster.gateway.responses.schemas import ResponsesRequest
from tests.parameters_page import PAGE, render

ROOT = Path(__file__).parents[4]
SCHEMAS: dict[str, type[RequestSchema]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
    COUNT_TOKENS: PromptRequest,
}
HELLO = [{"role": "user", "content": "hello"}]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 9},
    COUNT_TOKENS: {"messages": HELLO},
}
ROWS = [(endpoint, parameter) for endpoint, schema in SCHEMAS.items() for parameter in schema.parameters.values()]
ODD = {"odd": "value"}
"""No parameter allows it, except for objects without effect."""

VALUES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "other"}], "prompt": "other", "model": "m", "max_tokens": 3,
    "max_completion_tokens": 3, "temperature": 0.5, "top_p": 0.5, "n": 2, "seed": 3, "stop": "x", "stream": True,
    "stream_options": {"include_usage": True}, "presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"5": 1},
    "top_logprobs": 3, "echo": True, "best_of": 1, "service_tier": "flex", "reasoning_effort": "low", "top_k": 3,
    "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [5],
    "include_stop_str_in_output": True, "skip_special_tokens": False, "add_generation_prompt": True,
    "continue_final_message": True, "chat_template_kwargs": {"a": 1}, "truncate_prompt_tokens": 5, "cache_salt": "s",
    "return_token_ids": True, "prompt_logprobs": 2, "speculation": {"method": "none"},
    "tools": [{}], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"}, "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"],
    "guided_grammar": "start: /a/", "guided_whitespace_pattern": " ", "json_schema": {}, "regex": "a", "ebnf": "a",
    "input": "other", "instructions": "a", "max_output_tokens": 3, "text": {}, "reasoning": {}, "metadata": {},
    "include": [], "system": "a", "thinking": {}, "output_config": {}, "stop_sequences": ["x"],
}  # fmt: skip
"""A value of each honoured parameter that changes the request; those that differ between endpoints are below."""
OTHER_VALUES = {
    (CHAT, "logprobs"): True, (COMPLETIONS, "logprobs"): 3,
    (CHAT, "add_special_tokens"): True, (COMPLETIONS, "add_special_tokens"): False,
    (RESPONSES, "parallel_tool_calls"): False, (MESSAGES, "tool_choice"): {}, (COUNT_TOKENS, "tool_choice"): {},
}  # fmt: skip
OF_KIND: dict[str, list[Any]] = {
    "string": ["", "a"], "boolean": [True, False], "integer": [0, -3], "number": [1, 0.5], "object": [{}, {"a": 1}],
}  # fmt: skip


def parse(endpoint: str, **given: Any) -> RequestSchema:
    return parse_request(SCHEMAS[endpoint], {**BASES[endpoint], **given})


def name_of(value: object) -> str:
    return value.name if isinstance(value, Parameter) else str(value)


def rows(treatment: str) -> pytest.MarkDecorator:
    found = [row for row in ROWS if row[1].treatment == treatment]
    return pytest.mark.parametrize(("endpoint", "parameter"), found, ids=name_of)


def test_honoured_parameters_are_the_fields_of_the_schemas() -> None:
    for endpoint, schema in SCHEMAS.items():
        honoured = {parameter.name for known, parameter in ROWS if known == endpoint and parameter.rule is None}
        assert honoured == set(schema.model_fields)


def test_a_name_has_one_row_for_each_endpoint() -> None:
    names = [(endpoint, parameter.name) for endpoint, parameter in ROWS]
    assert len(set(names)) == len(names) > 150


@rows("honoured")
def test_honoured_parameters_change_the_request(endpoint: str, parameter: Parameter) -> None:
    value = OTHER_VALUES.get((endpoint, parameter.name), VALUES.get(parameter.name))
    assert parse(endpoint, **{parameter.name: value}) != parse(endpoint)


@rows("accepted")
def test_accepted_parameters_change_nothing(endpoint: str, parameter: Parameter) -> None:
    assert parameter.rule is not None
    for value in OF_KIND[str(parameter.rule.kind)]:
        assert parse(endpoint, **{parameter.name: value}) == parse(endpoint)
    with pytest.raises(InvalidRequestError, match=f"{parameter.name} must be an? ") as caught:
        parse(endpoint, **{parameter.name: [ODD]})
    assert caught.value.param == parameter.name


@rows("refused")
def test_refused_parameters_are_refused_by_name_unless_neutral(endpoint: str, parameter: Parameter) -> None:
    assert parameter.rule is not None
    for value in (None, *parameter.rule.values):
        assert parse(endpoint, **{parameter.name: value}) == parse(endpoint)
    body = {**BASES[endpoint], parameter.name: ODD}
    for given in (body, without_unknown(SCHEMAS[endpoint], body)[0]):
        with pytest.raises(UnsupportedParameterError, match=f"^{parameter.name} is not supported with") as caught:
            parse_request(SCHEMAS[endpoint], given)
        assert caught.value.param == parameter.name


@pytest.mark.parametrize("name", sorted({row.name for row in PARAMETERS if len(endpoints_of(row.name)) == 1}))
def test_parameters_of_the_other_endpoint_are_refused_by_name(name: str) -> None:
    (known,) = endpoints_of(name)
    (other,) = {CHAT, COMPLETIONS} - {known}
    body, ignored = without_unknown(SCHEMAS[other], {**BASES[other], name: "value"})
    assert not ignored
    with pytest.raises(UnsupportedParameterError, match=f"^{name} is a parameter of {known} only"):
        parse_request(SCHEMAS[other], body)


def test_parameters_of_both_are_refused_by_name_elsewhere() -> None:
    for endpoint in (RESPONSES, MESSAGES, COUNT_TOKENS):
        with pytest.raises(UnsupportedParameterError, match=f"^n is a parameter of {CHAT} and {COMPLETIONS} only"):
            parse(endpoint, n=2)


@pytest.mark.parametrize(
    ("endpoint", "name", "own"),
    [
        (RESPONSES, "max_tokens", "max_output_tokens"),
        (RESPONSES, "messages", "input"),
        (RESPONSES, "response_format", "text.format"),
        (MESSAGES, "stop", "stop_sequences"),
        (MESSAGES, "response_format", "output_config.format"),
        (CHAT, "prompt", "messages"),
        (CHAT, "max_output_tokens", "max_tokens"),
        (COMPLETIONS, "messages", "prompt"),
        (COMPLETIONS, "max_completion_tokens", "max_tokens"),
    ],
)
def test_parameters_of_other_apis_have_own_names(endpoint: str, name: str, own: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=rf"^{name} is .*\. Send {own}\.$"):
        parse(endpoint, **{name: 5})


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_what_to_send_instead_is_known(endpoint: str) -> None:
    schema = SCHEMAS[endpoint]
    for name, own in schema.own_names.items():
        assert name not in schema.parameters
        if "." not in own and " " not in own:
            assert own in schema.parameters


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_parameters_that_no_api_documents_are_unknown(endpoint: str) -> None:
    body = {**BASES[endpoint], "made_up": 1, "model": "m", "maxtokens": None}
    with pytest.raises(InvalidRequestError, match="Unknown parameter 'made_up'"):
        parse_request(SCHEMAS[endpoint], body)
    known, ignored = without_unknown(SCHEMAS[endpoint], body)
    assert ignored == ["made_up", "maxtokens"]
    assert parse_request(SCHEMAS[endpoint], known) == parse(endpoint, model="m")


@pytest.mark.parametrize("row", [row for row in ROWS if row[1].max_items is not None], ids=lambda row: row[1].name)
def test_entries_are_bounded(row: tuple[str, Parameter]) -> None:
    endpoint, parameter = row
    limit = parameter.max_items or 0
    for large in ([0] * (limit + 1), dict.fromkeys(map(str, range(limit + 1)), 0)):
        with pytest.raises(
            BatonError, match=f"{parameter.name} has {limit + 1} entries; at most {limit} are"
        ) as caught:
            parse(endpoint, **{parameter.name: large})
        assert caught.value.param == parameter.name


def test_the_page_shows_the_table() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == render(), "run: python -m tests.parameters_page"
