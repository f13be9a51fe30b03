"""Grammars of calls accept what the parsers read, and nothing else. llguidance's own matcher judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.formats.base import CallRule, Function
from cluster.gateway.formats.dialect import Dialect
from cluster.gateway.formats.registry import NONE, TOOL_FORMATS
from tests.unit.cluster.gateway.formats.samples import FUNCTIONS, Sample, parsed, parser_of, whole
from tests.unit.cluster.gateway.formats.tool_tokenizers import ADDED, SPECIAL, TEXT, transformers_tokenizer

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Form:
    """Calls of one family as its models are trained to write them.

    Attributes:
        call: writes a call of ``get_weather`` from the JSON values of its arguments.
        between: what is between two calls; ``None`` if a second call is not beside the first.
        text: an answer without a call.
    """

    name: str
    call: Callable[[dict[str, str]], str]
    between: str | None = None
    text: str = "It rains."


def _object(values: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in values.items()) + "}"


def _qwen_xml(values: dict[str, str]) -> str:
    pairs = "".join(f"<parameter={key}>\n{value.strip(chr(34))}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=get_weather>\n{pairs}</function>\n</tool_call>"


def _glm(values: dict[str, str], gap: str) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>{gap}<arg_value>{value.strip(chr(34))}</arg_value>{gap}"
        for key, value in values.items()
    )
    return f"<tool_call>get_weather{gap}{''.join(pairs)}</tool_call>"


def _minimax(values: dict[str, str]) -> str:
    pairs = (f'<parameter name="{key}">{value.strip(chr(34))}</parameter>\n' for key, value in values.items())
    invoke = f'<invoke name="get_weather">\n{"".join(pairs)}</invoke>'
    return f"<minimax:tool_call>\n{invoke}\n</minimax:tool_call>"


FORMS = [
    Form("hermes", lambda v: f'<tool_call>\n{{"name": "get_weather", "arguments": {_object(v)}}}\n</tool_call>', "\n"),
    Form("qwen_xml", _qwen_xml, "\n"),
    Form("glm", lambda v: _glm(v, "\n"), "\n"),
    Form("glm47", lambda v: _glm(v, ""), ""),
    Form("minimax", _minimax),
    Form(
        "kimi",
        lambda v: (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            f"{_object(v)}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    Form("llama_json", lambda v: f'{{"name": "get_weather", "parameters": {_object(v)}}}', "; "),
    Form("pythonic", lambda v: f"[get_weather({', '.join(f'{key}={value}' for key, value in v.items())})]"),
    Form("mistral", lambda v: f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_object(v)}}}]'),
    Form("mistral_args", lambda v: f"[TOOL_CALLS]get_weather[ARGS]{_object(v)}", ""),
    Form(
        "deepseek_v3",
        lambda v: (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            f"{_object(v)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    Form(
        "deepseek_v31",
        lambda v: (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_object(v)}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    Form(
        "harmony",
        lambda v: "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + _object(v),
        text="<|channel|>final<|message|>It rains.",
    ),
]
GOOD = {"city": '"Oslo"', "days": "3", "unit": '"c"'}
LEAST = {"city": '"Oslo"'}
NO_CITY = {"days": "3"}
WRONG_TYPE = {"city": '"Oslo"', "days": '"three"'}
WRONG_ENUM = {"city": '"Oslo"', "unit": '"k"'}
UNKNOWN_KEY = {"city": '"Oslo"', "wind": "3"}

FAMILY = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
KIND = pytest.mark.parametrize("kind", [SPECIAL, ADDED, TEXT])


@cache
def tokenizers(name: str, kind: str) -> tuple[Any, LLTokenizer, Dialect]:
    wrapped = transformers_tokenizer([*TOOL_FORMATS[name].markers, THINK, THINK_END], kind)
    reasoning = NONE if name == "harmony" else "think"
    return wrapped, from_tokenizer(wrapped), Dialect(Tokenizer(wrapped), name, reasoning)


def accepts(form: Form, kind: str, rule: CallRule | None, text: str, prompt: str = "", answer: str = "") -> bool:
    wrapped, guided, dialect = tokenizers(form.name, kind)
    grammar = dialect.grammar(rule, answer, prompt)
    assert LLMatcher.validate_grammar(grammar, guided) == ""
    matcher = LLMatcher(guided, grammar, log_level=0)
    token_ids = wrapped.encode(text, add_special_tokens=False)
    return (
        matcher.validate_tokens(token_ids) == len(token_ids)
        and matcher.consume_tokens(token_ids)
        and (matcher.is_accepting())
    )


def required(*, is_single: bool = False, functions: tuple[Function, ...] = FUNCTIONS) -> CallRule:
    return CallRule(functions, True, is_single)


AUTO = CallRule(FUNCTIONS, False, False, lambda function: function.strict)


@KIND
@FAMILY
def test_a_right_call_is_accepted_and_wrong_ones_are_not(form: Form, kind: str) -> None:
    right, wrong = form.call(GOOD), [form.call(values) for values in (NO_CITY, WRONG_TYPE, WRONG_ENUM, UNKNOWN_KEY)]
    for rule in (required(), required(is_single=True), AUTO):
        assert accepts(form, kind, rule, right)
        assert accepts(form, kind, rule, form.call(LEAST))
        assert not any(accepts(form, kind, rule, text) for text in wrong)
        assert not accepts(form, kind, rule, right.replace("get_weather", "get_weathers"))
    assert not accepts(form, kind, required(functions=FUNCTIONS[1:]), right)


@KIND
@FAMILY
def test_text_is_accepted_unless_a_call_is_required(form: Form, kind: str) -> None:
    assert accepts(form, kind, AUTO, form.text)
    assert not accepts(form, kind, required(), form.text)


@FAMILY
def test_a_single_call_allows_no_second_one(form: Form) -> None:
    if form.between is not None:
        two = form.between.join([form.call(GOOD), form.call(LEAST)])
        assert accepts(form, SPECIAL, required(), two)
        assert not accepts(form, SPECIAL, required(is_single=True), two)


@KIND
@pytest.mark.parametrize("form", FORMS[:-1], ids=lambda form: form.name)
def test_reasoning_may_come_first(form: Form, kind: str) -> None:
    call = form.call(GOOD)
    assert accepts(form, kind, required(), f"<think>\nHm.\n</think>\n\n{call}")
    assert accepts(form, kind, required(), f"Hm.\n</think>\n\n{call}", "assistant\n<think>\n")
    assert not accepts(form, kind, required(), call, "assistant\n<think>\n")
    assert not accepts(form, kind, required(), f"<think>Hm.</think>{call}", "<think>\n\n</think>\n\n")


def test_harmony_may_analyse_first() -> None:
    form = FORMS[-1]
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert accepts(form, SPECIAL, required(), thought + form.call(GOOD))
    assert not accepts(form, SPECIAL, required(), thought + form.text)
    assert accepts(form, SPECIAL, AUTO, thought + form.text)


@FAMILY
def test_the_parser_reads_what_the_grammar_accepts(form: Form) -> None:
    message = whole(parsed(parser_of(Sample("", form.name, "")), list(form.call(GOOD))))
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 3, "unit": "c"}'}
    assert message["content"] is None


@FAMILY
def test_definitions_of_a_schema_are_found(form: Form) -> None:
    schema = {
        "type": "object",
        "properties": {"days": {"$ref": "#/$defs/Days"}},
        "required": ["days"],
        "$defs": {"Days": {"type": "integer"}},
    }
    rule = required(functions=(Function("get_weather", schema),))
    assert accepts(form, SPECIAL, rule, form.call({"days": "3"}))
    assert not accepts(form, SPECIAL, rule, form.call({"days": "[]"}))


@FAMILY
def test_a_function_that_is_not_strict_takes_any_object_unless_a_call_is_required(form: Form) -> None:
    function = Function("get_weather", FUNCTIONS[0].parameters)
    free = CallRule((function,), False, False, lambda function: function.strict)
    call = form.call(WRONG_TYPE)
    assert not accepts(form, SPECIAL, required(functions=(function,)), call)
    assert accepts(form, SPECIAL, free, call)


ANSWER = LLMatcher.grammar_from_json_schema(
    {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]},
    overrides={"whitespace_flexible": False},
)
RIGHT, WRONG = '{"rain":true}', '{"rain":3}'


@KIND
@FAMILY
def test_an_answer_with_a_schema_may_be_a_call_instead(form: Form, kind: str) -> None:
    right, wrong = (form.text.replace("It rains.", text) for text in (RIGHT, WRONG))
    free = CallRule(FUNCTIONS, False, False, lambda _: False)
    call = form.call(GOOD) if form.name != "llama_json" else f"<|python_tag|>{form.call(GOOD)}"
    for rule in (free, AUTO, None):
        assert accepts(form, kind, rule, right, answer=ANSWER)
        assert not accepts(form, kind, rule, wrong, answer=ANSWER)
        assert not accepts(form, kind, rule, form.text, answer=ANSWER)
        assert accepts(form, kind, rule, call, answer=ANSWER) == (rule is not None)
    assert accepts(form, kind, required(), form.call(GOOD), answer=ANSWER)
    assert not accepts(form, kind, required(), right, answer=ANSWER)


@KIND
@pytest.mark.parametrize("form", FORMS[:-1], ids=lambda form: form.name)
def test_reasoning_precedes_an_answer_with_a_schema(form: Form, kind: str) -> None:
    assert accepts(form, kind, None, f"<think>\nHm.\n</think>\n\n{RIGHT}", answer=ANSWER)
    assert accepts(form, kind, None, f"Hm.</think>{RIGHT}", "<think>\n", answer=ANSWER)
    assert not accepts(form, kind, None, RIGHT, "<think>\n", answer=ANSWER)
    assert not accepts(form, kind, None, f"<think>\nHm.\n</think>\n\n{WRONG}", answer=ANSWER)
