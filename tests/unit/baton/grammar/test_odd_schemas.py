"""Schemas with values of any kind under their keywords, and keywords that say less than they seem to."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequestError
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import json_grammar
from tests.random_schemas import EOS, character_tokenizer

TOKENIZER = character_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, 96, {EOS})
INTEGERS = {"type": "object", "additionalProperties": {"type": "integer"}}
# fmt: off
KEYWORDS = [
    "$defs", "$id", "$ref", "additionalProperties", "allOf", "anyOf", "const", "contains", "default",
    "dependentRequired", "else", "enum", "exclusiveMinimum", "format", "if", "items", "maxContains", "maxItems",
    "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum",
    "multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames",
    "required", "then", "type", "uniqueItems", "x-guidance",
]
# fmt: on
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-3, 3) | st.sampled_from(["", "a", "object", "#", "("]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=3),
    max_leaves=6,
)


def accepts(schema: dict[str, Any], text: str) -> bool:
    state, tokens = GRAMMARS.compile(json_grammar(schema)), TOKENIZER.encode(text)
    words = state.allowed([], tokens)
    return words is not None and bool(words[EOS // 32] >> EOS % 32 & 1)


@given(st.dictionaries(st.sampled_from(KEYWORDS), _values, max_size=3))
@settings(deadline=None, max_examples=600)
def test_any_value_of_a_keyword_is_honoured_or_refused(schema: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequestError):
        GRAMMARS.compile(json_grammar(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"contains": {"type": "null"}, "minContains": 0},
        {"minContains": 3},
        {"uniqueItems": True, "maxItems": 1},
        {"if": {"type": "integer"}},
        {"then": {"type": "null"}, "else": {"type": "null"}},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"type": "string", "title": "Key"}},
        {"format": "binary"},
    ],
)
def test_a_keyword_that_allows_everything_is_left_out(schema: dict[str, Any]) -> None:
    for text in ("[1]", '{"a": 1}', '"x"'):
        assert accepts(schema, text)


@pytest.mark.parametrize(
    ("names", "more", "accepted"),
    [
        ({"enum": ["a", "b"]}, {}, ["{}", '{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}']),
        ({"enum": ["a", "b"], "type": "string"}, {"required": ["a", "b"]}, ['{"a": 1, "b": 2}']),
        ({"const": "b"}, {}, ["{}", '{"b": 2}']),
        ({"pattern": "^[ac]$"}, {}, ["{}", '{"a": 1}', '{"c": 3}']),
        ({"minLength": 1, "maxLength": 1}, {}, ["{}", '{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}', '{"c": 3}']),
        ({"minLength": 2}, {}, ["{}"]),
        ({"allOf": [{"enum": ["c"]}]}, {}, ["{}", '{"c": 3}']),
        ({"minLength": 0}, {}, ["{}", '{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}', '{"c": 3}']),
        ({"$ref": "#/$defs/J"}, {"$defs": {"J": {"$ref": "#/$defs/K"}, "K": {"const": "b"}}}, ["{}", '{"b": 2}']),
        ({"$ref": "#/$defs/K"}, {"$defs": {"K": {"enum": ["c"], "title": "K"}}}, ["{}", '{"c": 3}']),
    ],
)
def test_keys_of_a_mapping_may_be_listed(names: dict[str, Any], more: dict[str, Any], accepted: list[str]) -> None:
    schema = {**INTEGERS, "propertyNames": names, **more}
    texts = ["{}", '{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}', '{"c": 3}', '{"a": "x"}']
    assert [text for text in texts if accepts(schema, text)] == accepted


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({**INTEGERS, "propertyNames": {"format": "date"}}, r'Unimplemented keys: \["propertyNames"\]\.$'),
        ({**INTEGERS, "propertyNames": {"minLength": 1.5}}, "propertyNames"),
        ({**INTEGERS, "propertyNames": {"enum": ["a"]}, "properties": {"b": {}}}, "propertyNames"),
        ({**INTEGERS, "propertyNames": {"enum": ["a", 1]}}, "propertyNames"),
        ({"properties": {"not": {"anyOf": [{}, {"not": {"type": "null"}}]}}}, r"Unimplemented keys: \[\"not\"\]"),
        ({"type": "string", "format": "url"}, "Unknown format: url; leave it out, or use date, .* uri or uuid"),
        ({"$ref": "other.json#/a"}, r"\$ref 'other.json' leads outside of the schema"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "contradict each other"),
        ({"minimum": "a"}, "must be a number"),
        ({"type": 5}, "type must be a string or array"),
    ],
)
def test_what_is_refused_is_named(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        GRAMMARS.compile(json_grammar(schema))
