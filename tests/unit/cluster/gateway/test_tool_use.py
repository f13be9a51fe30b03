"""``tools``, ``tool_choice`` and ``parallel_tool_calls``: what may and what must be called."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from baton.grammar.compiler import GrammarCompiler
from cluster.gateway.formats.dialect import Dialect
from cluster.gateway.openai.plan import GatewayLimits, GenerationPlan, Planner
from cluster.gateway.openai.prompt_encoder import PromptEncoder
from cluster.gateway.openai.schemas import ChatCompletionRequest, parse_request
from cluster.gateway.openai.tool_use import ToolUse, resolve_tools
from cluster.gateway.work_threads import WorkThreads
from cluster.requests.generation import ModelCard
from tests.allowed_texts import allows_beginning
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
CARD = ModelCard(name="m", max_model_len=2048, vocab_size=TOKENIZER.vocab_size, created_unix_s=0)
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **fields}}


TOOLS = [tool("f"), tool("g", strict=True)]


def request(**fields: Any) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, {"messages": [{"role": "user", "content": "hello"}], **fields})


async def plan(dialect: Dialect | None = None, **fields: Any) -> GenerationPlan:
    return await Planner(PromptEncoder(TOKENIZER, WorkThreads(), dialect), GatewayLimits()).plan_chat(
        request(**fields), CARD
    )


def use(**fields: Any) -> ToolUse:
    return resolve_tools(request(tools=TOOLS, **fields))


def test_tools_that_may_not_be_called_have_no_effect() -> None:
    assert use(tool_choice="none") == ToolUse()
    for choice in ("none", "auto"):
        assert resolve_tools(request(tools=[], tool_choice=choice, parallel_tool_calls=True)) == ToolUse()


@pytest.mark.parametrize(
    ("choice", "names", "is_required", "is_single"),
    [
        (None, ["f", "g"], False, False),
        ("auto", ["f", "g"], False, False),
        ("required", ["f", "g"], True, False),
        (NAMED, ["f"], True, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, ["f"], False, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, ["f"], True, False),
    ],
)
def test_the_choice_decides_what_may_and_must_be_called(
    choice: Any, names: list[str], is_required: bool, is_single: bool
) -> None:
    found = use(tool_choice=choice)
    assert [function.name for function in found.functions] == names
    assert (found.is_required, found.is_single) == (is_required, is_single)
    assert list(found.listed) == TOOLS
    assert use(tool_choice=choice, parallel_tool_calls=False).is_single


def test_only_required_calls_and_strict_functions_are_constrained() -> None:
    assert resolve_tools(request(tools=[tool("f")])).rule() is None
    rule = use().rule()
    assert rule is not None
    assert [rule.schema_of(function) == function.parameters for function in use().functions] == [True, True]
    any_object, first, second = {"type": "object"}, {"type": "object", "a": 1}, {"type": "object", "b": 1}
    free, strict = tool("f", parameters=first), tool("g", strict=True, parameters=second)
    found = resolve_tools(request(tools=[free, strict]))
    rule = found.rule()
    assert rule is not None
    assert [rule.schema_of(function) for function in found.functions] == [any_object, second]
    found = resolve_tools(request(tools=[free, strict], tool_choice="required"))
    rule = found.rule()
    assert rule is not None
    assert [rule.schema_of(function) for function in found.functions] == [first, second]


def test_a_function_without_parameters_takes_none() -> None:
    (function,) = resolve_tools(request(tools=[{"type": "function", "function": {"name": "f"}}])).functions
    assert function.parameters == {"type": "object", "properties": {}}


async def test_the_tools_reach_the_prompt_unless_none_may_be_called() -> None:
    without = TOKENIZER.decode((await plan()).prompts[0].token_ids)
    assert "get_weather" in TOKENIZER.decode((await plan(tools=[tool("get_weather")])).prompts[0].token_ids)
    none = await plan(tools=[tool("get_weather")], tool_choice="none")
    assert TOKENIZER.decode(none.prompts[0].token_ids) == without
    assert none.new_parser is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, TOKENIZER.vocab_size, {0})
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 7}}\n</tool_call>'
WRONG_CALL = CALL.replace("7", '"x"')


def is_allowed(planned: GenerationPlan, text: str) -> bool:
    """Whether the plan's grammar allows a text as a beginning; everything is, without a grammar."""
    grammar = planned.prompts[0].params.grammar
    return not grammar or allows_beginning(grammar, text, GRAMMARS, TOKENIZER)


@pytest.mark.parametrize(
    ("parameters", "allowed"),
    [
        ({}, {CALL, WRONG_CALL, "Hello", '{"a": 7}'}),
        ({"tool_choice": "required"}, {CALL}),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, {CALL}),
        ({"tools": [tool("f", strict=True, parameters=SCHEMA)]}, {CALL, "Hello", '{"a": 7}'}),
        ({"guided_json": SCHEMA}, {CALL, WRONG_CALL, '{"a": 7}'}),
        ({"guided_json": SCHEMA, "tool_choice": "none"}, {'{"a": 7}'}),
        ({"guided_json": SCHEMA, "tool_choice": "required"}, {CALL}),
    ],
)
async def test_what_an_output_may_be(parameters: dict[str, Any], allowed: set[str]) -> None:
    planned = await plan(**{"tools": [tool("f", parameters=SCHEMA)], **parameters})
    assert {text for text in (CALL, WRONG_CALL, "Hello", '{"a": 7}') if is_allowed(planned, text)} == allowed


async def test_a_schema_of_a_function_that_cannot_be_honoured_is_named() -> None:
    right, wrong = {"type": "object"}, {"type": "object", "not": {}}
    with pytest.raises(InvalidRequestError, match=r"parameters of the function 'g': .*Unimplemented keys") as caught:
        await plan(tools=[tool("f", strict=True, parameters=right), tool("g", strict=True, parameters=wrong)])
    assert caught.value.param == "tools"


async def test_tools_are_refused_without_a_parser() -> None:
    with pytest.raises(UnsupportedParameterError, match=r"router\.tool_parser is none"):
        await plan(Dialect(TOKENIZER, "none"), tools=TOOLS)
    assert (await plan(Dialect(TOKENIZER, "none"))).new_parser is None


def test_a_number_that_no_float_holds_is_refused() -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "number", "maximum": float("inf")}}}
    with pytest.raises(
        InvalidRequestError, match=r"tools\[0\].function.parameters has a number beyond 1\.8e308"
    ) as caught:
        resolve_tools(request(tools=[tool("f", parameters=parameters)]))
    assert caught.value.param == "tools[0].function.parameters"


def test_null_is_absent_in_the_schema_of_arguments() -> None:
    schema = {"type": None, "properties": None, "required": None, "title": "f"}
    (function,) = resolve_tools(request(tools=[tool("f", parameters=schema)])).functions
    assert function.parameters == {"type": "object", "title": "f"}


@pytest.mark.parametrize("schema", [{"type": "array"}, {"type": "integer"}, {"type": ["null", "string"]}, {"type": 7}])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_that_are_no_object_are_refused(schema: dict[str, Any], choice: str) -> None:
    tools = [tool("f"), tool("g", parameters=schema)]
    with pytest.raises(
        InvalidRequestError, match=r"tools\[1\].function.parameters must be a schema of an object"
    ) as found:
        resolve_tools(request(tools=tools, tool_choice=choice))
    assert found.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "string"}, {"properties": {"a": {"type": "integer"}}}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": ["object", "array"]}}},
    ],
)
async def test_arguments_are_objects_alone(schema: dict[str, Any]) -> None:
    planned = await plan(tools=[tool("f", parameters=schema)], tool_choice="required")
    head = '<tool_call>\n{"name": "f", "arguments": '
    assert is_allowed(planned, head + '{"a": 1}')
    for value in ("[", "null", '"', "1"):
        assert not is_allowed(planned, head + value)


async def test_arguments_that_no_object_can_be_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"parameters of the function 'f': .*Unsatisfiable"):
        await plan(tools=[tool("f", parameters={"const": "x"})], tool_choice="required")
