"""Arguments that are not written as one JSON object follow their schema as well, or the schema is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from baton.core.errors import InvalidRequestError
from cluster.gateway.formats.base import CallRule, Function, OutputParser
from cluster.gateway.formats.registry import TOOL_FORMATS
from cluster.gateway.formats.schema_branches import alternatives_of
from cluster.gateway.formats.source import Source
from cluster.gateway.formats.tagged_values import converted
from tests.unit.cluster.gateway.formats.samples import parsed, whole
from tests.unit.cluster.gateway.formats.test_grammars import SPECIAL, TEXT, tokenizers

FORMS = ("qwen_xml", "glm", "glm47", "minimax", "pythonic", "hermes")
TAGGED = FORMS[:4]
STRING, NULL, COLOUR = {"type": "string"}, {"type": "null"}, {"enum": ["red", "blue"]}
DEFS = {"Colour": COLOUR, "Name": {"type": "string", "minLength": 3}}

KEPT: dict[str, Any] = {
    "string": STRING,
    "remarks": {"type": "string", "nullable": True, "example": "a", "contentEncoding": "base64"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-c/]+$"},
    "pattern found inside": {"type": "string", "pattern": "b[^\\]x]?a|c"},
    "pattern and length": {"type": "string", "pattern": "^a", "minLength": 3, "maxLength": 5},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "const": {"const": "a b"},
    "enum of everything": {"enum": ["a", "1", 1, 2.5, True, None, [1], {"a": "b"}]},
    "enum of a type": {"type": ["string", "null"], "enum": ["a", None, 3]},
    "optional": {"anyOf": [STRING, NULL], "default": None},
    "optional with a length": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 6}, NULL]},
    "types with a length": {"type": ["string", "integer", "boolean"], "maxLength": 3},
    "string or list": {"anyOf": [STRING, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
    "string or object": {"anyOf": [{"type": "object", "properties": {"a": NULL}, "required": ["a"]}, STRING]},
    "string or bounded number": {"anyOf": [STRING, {"type": "integer", "minimum": 5, "maximum": 12}]},
    "referred enum or null": {"anyOf": [{"$ref": "#/$defs/Colour"}, NULL]},
    "referred through allOf": {"allOf": [{"$ref": "#/$defs/Name"}], "description": "x"},
    "referred with a default": {"$ref": "#/$defs/Name", "default": "abc"},
    "one of constants": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]},
    "open enum": {"anyOf": [COLOUR, {"type": "string", "maxLength": 2}]},
    "integer": {"type": "integer", "minimum": 3, "maximum": 30},
    "list": {"type": "array", "items": STRING, "minItems": 1, "maxItems": 2},
    "nested any": {"anyOf": [{"anyOf": [{"type": "string", "pattern": "^x"}, NULL]}, {"type": "boolean"}]},
    "anything": {},
}


def schema_of(value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": value}, "required": ["v"], "$defs": DEFS}


def matcher(form: str, kind: str, schema: dict[str, Any]) -> tuple[Any, LLMatcher, Any]:
    wrapped, guided, dialect = tokenizers(form, kind)
    grammar = dialect.grammar(CallRule((Function("f", schema),), True, True), "", "")
    assert LLMatcher.validate_grammar(grammar, guided) == ""
    return wrapped, LLMatcher(guided, grammar, log_level=0), guided


PIECES = (
    "\n</parameter>\n",
    "</parameter>",
    "</arg_value>",
    '"',
    "]",
    "}",
    "null",
    "true",
    "12",
    "7",
    "[1, ",
    "ab",
    "xa",
)
PIECES += ("</think>", "xa", "<x", "None", " 3", "red", "{", "\n", "</tool_call>", ")", "2024-02-29", "1a", "[]", "é")


def answers(form: str, kind: str, schema: dict[str, Any], count: int) -> Iterator[str]:
    """Outputs that a grammar allows, drawn at random."""
    chance = random.Random(3)
    wrapped, first, guided = matcher(form, kind, schema)
    for _ in range(count):
        state, mask, output = first.deep_copy(), allocate_token_bitmask(1, guided.vocab_size), []
        while not state.is_stopped() and len(output) < 300:
            if state.is_accepting():
                break
            piece = wrapped.encode(chance.choice(PIECES), add_special_tokens=False)
            if chance.random() < 0.7 and state.validate_tokens(piece) == len(piece):
                drawn = piece
            else:
                fill_next_token_bitmask(state, mask)
                allowed = [i for i in range(guided.vocab_size) if mask[0, i // 32] >> (i % 32) & 1]
                drawn = [chance.choice(allowed)]
            assert state.consume_tokens(drawn)
            output += drawn
        if state.is_accepting():
            yield wrapped.decode(output, skip_special_tokens=False)


COUNTS = [6, pytest.param(60, marks=pytest.mark.thorough(covered_by="[6-"))]


@pytest.mark.parametrize(("form", "kind"), [*((form, TEXT) for form in FORMS), ("glm47", SPECIAL)])
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("count", COUNTS)
def test_whatever_a_grammar_allows_is_valid(name: str, form: str, kind: str, count: int) -> None:
    schema = schema_of(KEPT[name])
    found = set()
    for text in answers(form, kind, schema, count):
        if "\ufffd" in text:
            continue  # drawn bytes that are no text
        source = Source()
        parser = OutputParser(source, TOOL_FORMATS[form].parse(source, [Function("f", schema)]))
        message = whole(parsed(parser, list(text)))
        assert "tool_calls" in message, text
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, schema)
        found.add(json.dumps(arguments))
    assert found, "no answer was complete"


QWEN = "<tool_call>\n<function=f>\n<parameter=v>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f<arg_key>v</arg_key><arg_value>{}</arg_value></tool_call>"


def allows(form: str, schema: dict[str, Any], value: str) -> bool:
    """Whether a call with the text ``value`` is allowed."""
    text = {"qwen_xml": QWEN, "glm47": GLM}[form].format(value)
    wrapped, state, _ = matcher(form, TEXT, schema)
    token_ids = wrapped.encode(text, add_special_tokens=False)
    return state.validate_tokens(token_ids) == len(token_ids)


EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "string": (["", "a<b> &", '"quoted"', "two\nlines", "[1"], []),
    "lengths": (["ab", "éé", "a\nb"], ["a", "abcde"]),
    "pattern": (["a/b", "c"], ["", "ad", "a b"]),
    "pattern found inside": (["xbya", "c", "ba"], ["b]a", "x"]),
    "date": (["2024-02-29"], ["2023-02-29", "today"]),
    "const": (["a b"], ["ab", '"a b"']),
    "enum of everything": (["a", "1", "2.5", "true", "null", "[1]", '{"a": "b"}'], ["2", "b"]),
    "enum of a type": (["a", "null"], ["3", "None"]),
    "optional": (["null", "abc", ""], []),
    "optional with a length": (["null", "ab"], ["a", "None", " null "]),
    "types with a length": (["12345", "true", "abc"], ["abcd", " 1 "]),
    "string or list": (["[1, 2]", "a", "1"], ['["a"]', " [1]", "[1, 2, 3]"]),
    "string or bounded number": (["5", "a5"], ["4", "13"]),
    "referred enum or null": (["red", "null"], ["green", '"red"']),
    "referred through allOf": (["abc"], ["ab"]),
    "open enum": (["blue", "gr"], ["green"]),
    "integer": (["30"], ["31", "3.5"]),
    "list": (['["</parameter>"]', '["</arg_value>", "b"]'], ["[]", "a"]),
    "nested any": (["xyz", "null", "true"], ["yx", "None"]),
}


@pytest.mark.parametrize("form", ["qwen_xml", "glm47"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_texts_that_are_allowed(name: str, form: str) -> None:
    schema = schema_of(KEPT[name])
    right, wrong = EXAMPLES[name]
    assert [text for text in right if not allows(form, schema, text)] == []
    assert [text for text in wrong if allows(form, schema, text)] == []


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"type": "string", "format": "uri"}, "format 'uri'"),
        ({"type": "string", "pattern": "^a|b$"}, "pattern '^a|b$', which has an anchor"),
        ({"type": "string", "pattern": r"\bword"}, "which has an anchor"),
        ({"type": "string", "not": {"const": "a"}}, "not cannot"),
        ({"type": "string", "minLength": "a"}, "minLength 'a'"),
        ({"type": "string", "enum": ["a"], "pattern": "b"}, "enum or const beside pattern"),
        ({"type": "string", "enum": [1]}, "an enum without a value"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "oneOf whose alternatives may be equal"),
        ({"not": {"type": "integer"}}, "not cannot"),
        ({"allOf": [{"minLength": 1}, {"maxLength": 3}], "type": "string"}, "allOf cannot"),
    ],
)
@pytest.mark.parametrize("form", TAGGED)
def test_what_cannot_be_kept_to_in_a_text_is_named(form: str, value: Any, named: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"The parameters of the function '\w+': The grammar cannot be honoured: "
    ) as raised:
        matcher(form, TEXT, schema_of(value))
    assert named in raised.value.message
    assert raised.value.param == "tools"
    assert matcher("hermes", TEXT, schema_of({"type": "string", "format": "uri"}))


ONE = {"type": "object", "properties": {"v": STRING, "w": STRING}, "required": ["v"]}


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"anyOf": [{"required": ["v"]}, {"required": ["w"]}]}, "anyOf"),
        ({"minProperties": 2}, "minProperties"),
        ({"maxProperties": 1}, "maxProperties"),
        ({"dependentRequired": {"v": ["w"]}, "not": {}}, "dependentRequired, not"),
        ({"patternProperties": {"v": {}}}, "patternProperties"),
        ({"required": ["x"], "additionalProperties": False}, "required, which has keys"),
        ({"properties": {"v": False}}, "required, which has keys that are forbidden"),
        ({"required": ["x"], "additionalProperties": {"type": "integer"}}, "additionalProperties as a schema"),
        ({"properties": {"v": STRING, "w": {"$ref": "#"}}}, '"$ref": "#"'),
        ({"properties": {"v": {"type": "array", "items": {"anyOf": [{"$ref": "#"}]}}}}, '"$ref": "#"'),
    ],
)
@pytest.mark.parametrize("form", [*TAGGED, "pythonic"])
def test_what_cannot_be_kept_to_in_a_list_of_arguments_is_named(form: str, keywords: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"of a function's parameters cannot be kept to") as raised:
        matcher(form, TEXT, ONE | keywords)
    assert named in raised.value.message


@pytest.mark.parametrize("keywords", [{"minProperties": 1, "maxProperties": 2.0}, {"title": "T"}, {"nullable": True}])
@pytest.mark.parametrize("form", ["qwen_xml", "glm47"])
def test_keywords_that_hold_anyway_are_accepted(form: str, keywords: Any) -> None:
    assert allows(form, ONE | keywords, "a")


@pytest.mark.parametrize("form", ["qwen_xml", "glm47"])
def test_a_key_without_a_schema_may_be_required(form: str) -> None:
    assert allows(form, {"type": "object", "required": ["v"]}, "a")
    assert not allows(form, {"type": "object", "required": ["w"]}, "a")
    assert not allows(form, {"type": "object", "additionalProperties": False}, "a")


def test_what_belongs_together_is_not_taken_from_two_schemas() -> None:
    closed = {"type": "object", "additionalProperties": False}
    schema = {"$ref": "#/$defs/A", "properties": {"v": STRING}, "$defs": {"A": closed}}
    with pytest.raises(InvalidRequestError, match=r"\$ref of a function's parameters cannot be kept to"):
        matcher("glm47", TEXT, schema)


@pytest.mark.parametrize("form", ["qwen_xml", "glm47"])
def test_a_key_may_be_forbidden(form: str) -> None:
    assert not allows(form, {"type": "object", "properties": {"v": False}}, "a")
    assert allows(form, {"type": "object", "properties": {"v": True}}, "a")


@pytest.mark.parametrize("form", ["qwen_xml", "glm47"])
def test_parameters_may_be_a_reference(form: str) -> None:
    arguments = schema_of(KEPT["lengths"]) | {"$defs": {}}
    schema = {"type": "object", "$ref": "#/$defs/Arguments", "$defs": {"Arguments": arguments}}
    assert allows(form, schema, "abc")
    assert not allows(form, schema, "abcde")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["from", "x-y", "\ufb01", "e\u0301", "$a.b"])
def test_keys_need_not_be_names_in_a_language(form: str, key: str) -> None:
    schema = {"type": "object", "properties": {key: {"enum": [1]}}, "required": [key], "additionalProperties": False}
    text = next(answers(form, TEXT, schema, 20))
    parser = OutputParser(source := Source(), TOOL_FORMATS[form].parse(source, [Function("f", schema)]))
    (call,) = whole(parsed(parser, list(text)))["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {key: 1}


@pytest.mark.parametrize(("form", "key"), [("pythonic", "a b"), ("pythonic", ""), ("glm", "<a"), ("qwen_xml", " a")])
def test_keys_that_calls_cannot_have_are_named(form: str, key: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot have the argument '"):
        matcher(form, TEXT, {"type": "object", "properties": {key: {}}})


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("from='a', class=[1, 'b'], x-y=None", {"from": "a", "class": [1, "b"], "x-y": None}),
        ("a=1, a=2,", {"a": 2}),
        ("a='x, y)', b=(1, 2)", {"a": "x, y)", "b": [1, 2]}),
        (' a = {"k": true} , b = {"k": True} ', {"a": {"k": True}, "b": {"k": True}}),
        ('a="\\ud83d\\ude00\\/"', {"a": "\U0001f600/"}),
        (r"a='\ud800'", {"a": "\ud800"}),
        ("", {}),
        *((wrong, None) for wrong in ("1", "a", "a=b", "a==1", "**{'a': 1}", "a=f'x'", "a=NaN", "=1", "a=", "a=1 b=2")),
    ],
)
def test_arguments_in_the_notation_of_python(text: str, arguments: dict[str, Any] | None) -> None:
    parser = OutputParser(source := Source(), TOOL_FORMATS["pythonic"].parse(source, [Function("f", {})]))
    message = whole(parsed(parser, list(f"[f({text})]")))
    json.dumps(message, ensure_ascii=False).encode()
    calls = message.get("tool_calls")
    assert (None if calls is None else json.loads(calls[0]["function"]["arguments"])) == arguments


@pytest.mark.parametrize("value", ["1.10e400", "1" * 5000, '[1e999, "\\ud800"]', '{"a":  1}', "null"])
def test_values_of_json_stay_as_they_are(value: str) -> None:
    texts = {"pythonic": f"[f(v={value})]", "glm47": GLM.format(value), "qwen_xml": QWEN.format(value)}
    texts["llama_json"] = f'{{"name": "f", "parameters": {{"v": {value}}}}}'
    for form, text in texts.items():
        functions = [Function("f", schema_of({"type": ["number", "string", "array", "object", "null"]}))]
        parser = OutputParser(source := Source(), TOOL_FORMATS[form].parse(source, functions))
        (call,) = whole(parsed(parser, list(text)))["tool_calls"]
        assert call["function"]["arguments"] == f'{{"v": {value}}}'


@pytest.mark.parametrize("text", ["NaN", "-Infinity", '"quoted"', "tru"])
@pytest.mark.parametrize("types", [["string", "number", "null"], []])
def test_other_texts_are_strings(text: str, types: list[str]) -> None:
    assert json.loads(converted(text, types)) == text


WORDS = [
    "type",
    "anyOf",
    "oneOf",
    "allOf",
    "enum",
    "const",
    "$ref",
    "minLength",
    "pattern",
    "format",
    "properties",
    "not",
]
WORDS += ["required", "$defs", "A", "items", "additionalProperties", "minProperties", "maxLength"]
GARBAGE: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(-1, 3)
    | st.sampled_from(["string", "a", "#/$defs/A", "^a$"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(WORDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("form", ["qwen_xml", "pythonic"])
@settings(max_examples=150, deadline=None)
@given(schema=st.dictionaries(st.sampled_from(["properties", "required", "$defs", "anyOf", "$ref"]), GARBAGE))
def test_what_is_no_schema_is_refused(form: str, schema: dict[str, Any]) -> None:
    function = Function("f", schema | {"type": "object"})
    with suppress(InvalidRequestError):
        tokenizers(form, TEXT)[2].grammar(CallRule((function,), True, True), "", "")
    parser = OutputParser(source := Source(), TOOL_FORMATS[form].parse(source, [function]))
    assert parsed(parser, [QWEN.format("1"), "[f(v=1)]"])


@pytest.mark.parametrize("form", ["qwen_xml", "pythonic"])
def test_definitions_that_many_arguments_refer_to_are_bounded(form: str) -> None:
    large = {"enum": [f"option {number}" for number in range(1000)]}
    properties = {f"v{number}": {"anyOf": [{"$ref": "#/$defs/A"}, NULL]} for number in range(1000)}
    with pytest.raises(InvalidRequestError, match="more than 262144 characters, with what each argument refers to"):
        matcher(form, TEXT, {"type": "object", "properties": properties, "$defs": {"A": large}})


@pytest.mark.parametrize("count", [1, 10])
def test_alternatives_that_refer_to_themselves_end(count: int) -> None:
    again = {"anyOf": [{"$ref": "#/$defs/A"}] * count}
    schema = {**again, "$defs": {"A": again}}
    assert len(alternatives_of(schema).branches) < 2000
    with pytest.raises(InvalidRequestError, match="anyOf cannot be kept to"):
        matcher("glm47", TEXT, {"type": "object", "properties": {"v": schema}})
