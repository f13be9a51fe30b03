"""What requests ask for under each client's names for schemas and grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from baton.grammar.compiler import GrammarCompiler
from cluster.gateway.openai.plan import GatewayLimits, GenerationPlan, Planner
from cluster.gateway.openai.prompt_encoder import PromptEncoder
from cluster.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest, parse_request
from cluster.gateway.work_threads import WorkThreads
from cluster.requests.generation import ModelCard
from tests.allowed_texts import allows_beginning
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
CARD = ModelCard(name="m", max_model_len=64, vocab_size=TOKENIZER.vocab_size, created_unix_s=0)
PLANNER = Planner(PromptEncoder(TOKENIZER, WorkThreads()), GatewayLimits())
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, TOKENIZER.vocab_size, {0})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OF_SCHEMA, OF_OBJECT, OF_DIGITS, OF_CHOICE = '{"a": 7}', '{"b": [1]}', "123", "x|y"
TEXTS = OF_SCHEMA, OF_OBJECT, OF_DIGITS, OF_CHOICE, "other"


async def plan(**parameters: Any) -> GenerationPlan:
    body = {"messages": [{"role": "user", "content": "hello"}], **parameters}
    return await PLANNER.plan_chat(parse_request(ChatCompletionRequest, body), CARD)


def texts_of(planned: GenerationPlan) -> set[str]:
    """Those of :data:`TEXTS` that the plan's grammar allows."""
    grammar = planned.prompts[0].params.grammar
    return {text for text in TEXTS if allows_beginning(grammar, text, GRAMMARS, TOKENIZER)}


@pytest.mark.parametrize(
    ("parameters", "texts"),
    [
        ({"response_format": {"type": "json_object"}}, {OF_SCHEMA, OF_OBJECT}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {OF_SCHEMA}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            {OF_SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {OF_SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {OF_SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, {OF_SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, set()),
        ({"structured_outputs": {"json": {"properties": {}}}}, {OF_SCHEMA, OF_OBJECT, OF_DIGITS}),
        ({"structured_outputs": {"json": {"properties": {}}, "disable_additional_properties": True}}, {OF_DIGITS}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, {OF_SCHEMA, OF_OBJECT}),
        ({"structured_outputs": {"regex": "[0-9]+"}}, {OF_DIGITS}),
        ({"structured_outputs": {"choice": ["x|y", "z"]}}, {OF_CHOICE}),
        ({"structured_outputs": {"grammar": 'root ::= [0-9]+ | "other"'}}, {OF_DIGITS, "other"}),
        ({"guided_json": SCHEMA}, {OF_SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"}, {OF_SCHEMA}),
        ({"guided_regex": "[0-9]+"}, {OF_DIGITS}),
        ({"guided_choice": ["x|y"]}, {OF_CHOICE}),
        ({"guided_grammar": "start: /[0-9]+/"}, {OF_DIGITS}),
        ({"json_schema": json.dumps(SCHEMA)}, {OF_SCHEMA}),
        ({"regex": "[0-9]+"}, {OF_DIGITS}),
        ({"ebnf": "root ::= [0-9]+"}, {OF_DIGITS}),
    ],
)
async def test_every_name_for_a_grammar(parameters: dict[str, Any], texts: set[str]) -> None:
    assert texts_of(await plan(**parameters)) == texts


@pytest.mark.parametrize("parameters", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
async def test_no_grammar(parameters: dict[str, Any]) -> None:
    assert (await plan(**parameters)).prompts[0].params.grammar == ""


async def test_completions_have_grammars_too() -> None:
    request = parse_request(CompletionRequest, {"prompt": ["a", "b"], "guided_regex": "[0-9]+"})
    planned = await PLANNER.plan_completion(request, CARD)
    assert [texts_of(planned)] * 2 == [{OF_DIGITS}] * 2
    assert planned.prompts[0].params.grammar == planned.prompts[1].params.grammar


async def test_grammars_that_were_loaded_before_are_used() -> None:
    """Loading a vocabulary holds Python's lock for half a second, so routers do it before they serve."""
    grammars = GrammarCompiler(TOKENIZER.to_json, TOKENIZER.vocab_size, ())
    planner = Planner(PromptEncoder(TOKENIZER, WorkThreads(), grammars=grammars), GatewayLimits())
    request = parse_request(CompletionRequest, {"prompt": "a", "guided_regex": "ab*"})
    await planner.plan_completion(request, CARD)
    assert len(grammars._compiled) == 1


@pytest.mark.parametrize(
    ("parameters", "param", "reason"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "json_schema must be an object with a schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            "Unimplemented keys",
        ),
        (
            {"response_format": {"type": "json_object", "jso": 1}},
            "response_format.jso",
            "Unknown key in response_format",
        ),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": "7"}, "guided_json", "must be a JSON schema, got an integer"),
        ({"guided_json": '{"enum": [[1, -1e999]]}'}, "guided_json", "has a number beyond 1.8e308"),
        ({"guided_regex": "("}, "guided_regex", "cannot be honoured"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern", "unclosed group"),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "x"},
            "guided_whitespace_pattern",
            "match only",
        ),
        ({"json_schema": SCHEMA, "guided_whitespace_pattern": "\\"}, "guided_whitespace_pattern", "backslash"),
        ({"guided_json": {"not": {}}, "guided_whitespace_pattern": " "}, "guided_json", "Unimplemented keys"),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": "("}},
            "structured_outputs.whitespace_pattern",
            r"^structured_outputs\.whitespace_pattern: .*unclosed group",
        ),
        ({"guided_regex": ""}, "guided_regex", "not empty"),
        ({"guided_choice": []}, "guided_choice", "array of 1 to 10000 strings"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "not empty"),
        ({"guided_regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "guided_regex and ebnf contradict"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, json_object, .* got none"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "got json, regex"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "did you mean 'json'"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex", "must be a string"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 3}}, "structured_outputs", "must be a string"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "must be true or absent"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "false for an answer with a grammar"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "0 for an answer with a grammar"),
    ],
)
async def test_wrong_wishes_are_named(parameters: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        await plan(**parameters)
    assert caught.value.param == param


async def test_a_tag_of_structures_is_not_supported() -> None:
    with pytest.raises(UnsupportedParameterError, match="structural_tag is not supported; send a grammar"):
        await plan(structured_outputs={"structural_tag": "{}"})
