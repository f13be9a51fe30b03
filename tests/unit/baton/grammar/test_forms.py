from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequestError
from baton.grammar import fault_place
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import (
    ANY_OBJECT,
    beyond_white_space,
    choice_grammar,
    json_grammar,
    notation_grammar,
    regex_grammar,
)
from tests.allowed_texts import allows_beginning
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, TOKENIZER.vocab_size, {0})
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def any_machine_is_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_place, "_MAX_SECONDS", 60.0)


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar allows this text as a whole."""
    if not allows_beginning(grammar, text, GRAMMARS, TOKENIZER):
        return False
    allowed = GRAMMARS.compile(grammar).allowed(TOKENIZER.encode(text))
    return allowed is not None and bool(allowed[0] & 1)  # the token 0 ends a text


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('{"name": "日本 \\"x\\"", "age": -1}', True),
        ('{"age": 36, "name": "Ada"}', False),
        ('{"name": "Ada", "age": 36, "city": "Rome"}', False),
        ('{"name": "Ada", "age": "36"}', False),
        ('{"name": "Ada"}', False),
        ('{"name":"Ada","age":36}', False),
        ('{"name": "Ada", "age": 36}\n', False),
    ],
)
def test_documents_of_a_schema(text: str, is_right: bool) -> None:
    assert accepts(json_grammar(PERSON), text) is is_right


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, '{"a": [1, 2]}'),
        ({"is_compact": True}, '{"a":[1,2]}'),
        ({"whitespace": r"[ \n]{0,2}"}, '{\n "a" : [1,2\n]}'),
    ],
)
def test_white_space_is_chosen(options: Mapping[str, Any], text: str) -> None:
    assert accepts(json_grammar(ANY_OBJECT, **options), text)
    assert not accepts(json_grammar(ANY_OBJECT, **options), text.replace("[", "[\t"))


@pytest.mark.parametrize("pattern", [" ?", r"\s*", r"[\s]{0,3}", "[\t ]*", r"\n"])
def test_white_space_of_json(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="allows no text"):
        GRAMMARS.compile(beyond_white_space(pattern))
    assert accepts(json_grammar({"const": 7}, whitespace=pattern), "7")


@pytest.mark.parametrize("pattern", ["x", " |/", r"\\s", r"[\sa]*", "\u00a0?", r"\S", r"[^\s]"])
def test_what_is_beyond_the_white_space_of_json(pattern: str) -> None:
    GRAMMARS.compile(beyond_white_space(pattern))


def test_any_white_space_is_that_of_json() -> None:
    grammar = json_grammar(ANY_OBJECT, whitespace=r"\s*")
    assert accepts(grammar, '{ "a" :\t1\r\n}')
    assert not accepts(grammar, '{\u00a0"a":1}')


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True), st.text(max_size=8))
@settings(deadline=None, max_examples=60)
def test_choices_are_taken_literally(choices: list[str], other: str) -> None:
    grammar = choice_grammar(choices)
    for choice in choices:
        assert accepts(grammar, choice)
    assert accepts(grammar, other) is (other in choices)


def test_an_expression_matches_the_whole_text() -> None:
    assert accepts(regex_grammar("[a-c]+"), "abcab")
    assert not accepts(regex_grammar("[a-c]+"), "abd")


@pytest.mark.parametrize("grammar", ['start: "a" INT\nINT: /[0-9]+/', 'root ::= "a" digits\ndigits ::= [0-9]+'])
def test_both_notations_are_understood(grammar: str) -> None:
    assert accepts(notation_grammar(grammar), "a17")
    assert not accepts(notation_grammar(grammar), "17")


def test_a_broken_gbnf_grammar_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"GBNF grammar cannot be read: .*Unexpected end"):
        notation_grammar('root ::= "a" [0-9')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, r'Unimplemented keys: \["not"\]'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "colour"}, "Unknown format: colour"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "frog"}, "Invalid type: frog"),
        ({"$ref": "http://example.com/schema"}, "http://example.com/schema' leads outside of the schema"),
        ({"oneOf": [{"type": "string"}, {"type": "string"}]}, "oneOf is not supported where .* use anyOf"),
        ({"type": "object", "x-guidance": {"lenient": True}, "not": {}}, "not"),
        (False, "Unsatisfiable"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"allOf": [{"$ref": "#"}]}, "leads back to itself"),
        (functools.reduce(lambda inner, _: {"items": inner}, range(150), True), r"about 120 .* use \$defs and \$ref"),
        ({"type": "string", "maxLength": 3.5}, "integer for 'maxLength', got 3.5"),
        ({"type": "string", "pattern": "("}, r'the regular expression "\(" is wrong: unclosed group'),
        ({"type": "string", "maxLength": 2**32}, "maxLength is 4294967296; at most 4,294,967,295"),
        ({"type": "string", "minLength": 1e30}, r"minLength is 1e\+30; at most"),
        ({"type": "array", "maxItems": 1e30}, "integer for 'maxItems', got 1e30"),
        ({"type": "integer", "minimum": 10**18}, "bound of a number .* has more than 18 digits"),
        ({"type": "number", "exclusiveMinimum": 1e20}, "bound of a number .* has more than 18 digits"),
        *(
            (
                {"properties": {"a": {"anyOf": [{keyword: value}]}}},
                rf"{keyword} has a whole number outside of -2\^63 to",
            )
            for keyword in ("minimum", "exclusiveMaximum", "multipleOf", "minLength", "maxItems", "const", "default")
            for value in (10**30, -(10**5000))
        ),
        ({"enum": [1, [{"a": 2**64}]]}, r"enum has a whole number outside of -2\^63 to 2\^64 - 1"),
    ],
)
def test_what_a_schema_asks_in_vain_is_named(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot be honoured: .*{reason}"):
        GRAMMARS.compile(json_grammar(schema))


@pytest.mark.parametrize(
    "fault",
    [
        {"not": {}},
        {"type": "frog"},
        {"type": "string", "format": "colour"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "minLength": -1},
        {"oneOf": [{"type": "string"}, {"type": "string"}]},
        {"type": "object", "minProperties": 4},
        {"type": "object", "properties": {"k": {"type": "string"}}, "maxProperties": 3},
        {"const": 2**60 + 1},
        {"enum": [0.12345678901234567]},
        {"type": "integer", "multipleOf": 1e6},
        {"type": "string", "required": True},
        {"$ref": "#/$defs/missing"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("place", "schema"),
    [
        ("properties.a.items", lambda fault: {"properties": {"a": {"items": fault}, "b": {"type": "string"}}}),
        ("anyOf.1", lambda fault: {"anyOf": [{"type": "string"}, fault]}),
        ("$defs.inner", lambda fault: {"$defs": {"inner": fault}, "properties": {"a": {"$ref": "#/$defs/inner"}}}),
    ],
)
def test_the_place_of_a_fault_in_a_schema_is_named(place: str, schema: Callable[[Any], Any], fault: Any) -> None:
    for grammar in (
        json_grammar(schema(fault)),
        notation_grammar(f'start: "a" %json {json.dumps(schema(fault))}'),
    ):
        with pytest.raises(InvalidRequestError, match=rf"^The grammar cannot be honoured: in {re.escape(place)}: "):
            GRAMMARS.compile(grammar)


def test_the_place_of_one_fault_among_many_properties_is_named() -> None:
    names = [f"k{index}" for index in range(600)]
    schema = {"properties": {name: {"type": "string"} for name in names}, "required": names}
    schema["properties"]["k599"] = {"type": "array", "items": {"not": {}}}
    with pytest.raises(InvalidRequestError, match=r"honoured: in properties\.k599\.items: Unimplemented keys"):
        GRAMMARS.compile(json_grammar({"type": "object", "additionalProperties": False, **schema}))


def test_faults_of_several_kinds_are_told_one_by_one() -> None:
    """The library may come to another one first where parts are tried together."""
    schema = {"properties": {"a": {"not": {}}, "b": {"type": "frog"}, "c": {"type": "string", "format": "colour"}}}
    with pytest.raises(InvalidRequestError, match=r"honoured: in properties\.a: Unimplemented keys"):
        GRAMMARS.compile(json_grammar(schema))


def test_a_place_behind_references_is_that_of_the_definition() -> None:
    schema = {
        "$defs": {"a": {"items": {"$ref": "#/$defs/b~1c"}}, "b/c": {"properties": {"x": {"not": {}}}}},
        "$ref": "#/$defs/a",
    }
    with pytest.raises(InvalidRequestError, match=r"honoured: in \$defs\.b/c\.properties\.x: Unimplemented keys"):
        GRAMMARS.compile(json_grammar(schema))


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (
            {"$defs": {"T": {"properties": {"z": {}, "c": {"items": {"$ref": "#/$defs/T"}, "not": {}}}}},
             "$ref": "#/$defs/T"},
            r"$defs.T.properties.c: Unimplemented keys",
        ),
        (
            {"$defs": {"T": {"properties": {"c": {"items": {"$ref": "#/$defs/T"}}, "z": {"not": {}}}}},
             "properties": {"a": {"$ref": "#/$defs/T"}}},
            r"$defs.T.properties.z: Unimplemented keys",
        ),
        (
            {"properties": {"a": {"properties": {"b": {"minimum": 5, "maximum": 3, "type": "integer"}},
             "required": ["b"], "type": "object"}}, "required": ["a"], "type": "object"},
            r"properties.a.properties.b: Unsatisfiable schema: minimum (5) is greater than maximum (3)",
        ),
    ],
)  # fmt: skip
def test_the_smallest_part_is_named_whatever_leads_to_it(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"honoured: in {re.escape(told)}"):
        GRAMMARS.compile(json_grammar(schema))


def test_a_fault_of_the_whole_schema_has_no_place() -> None:
    with pytest.raises(InvalidRequestError, match=r'honoured: Unimplemented keys: \["not"\]\.$'):
        GRAMMARS.compile(json_grammar({"not": {}, "properties": {"a": {"type": "string"}}}))


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("end", ["", "#"])
@pytest.mark.parametrize(
    "name",
    ["json-schema.org/draft-04/schema", "json-schema.org/draft-07/schema", "json-schema.org/draft/2019-09/schema",
     "json-schema.org/draft/2020-12/schema", "json-schema.org/schema", "spec.openapis.org/oas/3.1/dialect/base"],
)  # fmt: skip
def test_a_known_draft_may_be_named_in_any_way(scheme: str, name: str, end: str) -> None:
    schema = {"$schema": f"{scheme}://{name}{end}", "$ref": "#/definitions/a", "definitions": {"a": {"enum": [7]}}}
    assert accepts(json_grammar(schema), "7")
    assert not accepts(json_grammar(schema), "8")


@pytest.mark.parametrize("name", ["http://json-schema.org/draft-03/schema#", "foo", "", 5])
def test_other_drafts_are_refused_by_name(name: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"honoured: \$schema {re.escape(repr(name))} is not supported"):
        GRAMMARS.compile(json_grammar({"$schema": name, "type": "integer", "divisibleBy": 7}))


def test_null_is_no_keyword() -> None:
    """Some languages write absent lists and texts as null."""
    schema = {"type": "object", "required": None, "properties": {"a": {"type": "integer", "minimum": None}},
              "additionalProperties": False, "$schema": None}  # fmt: skip
    assert accepts(json_grammar(schema), '{"a": 1}')
    assert accepts(json_grammar(schema), "{}")
    for schema in ({"const": None}, {"enum": [None]}):
        assert accepts(json_grammar(schema), "null")
        assert not accepts(json_grammar(schema), "1")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('%llguidance {"no_forcing": true}\nstart: "a"', "option 'no_forcing' of %llguidance"),
        ('%llguidance {}\n%llguidance {"foo": 1}\nstart: "a"', "option 'foo' of %llguidance .*; known are allow_init"),
        ('start: x\nx[capture, temperature=0.5]: "a"', "rule x has temperature, which only"),
        ('start: x\n?x[stop="]", max_tokens=5]: /a+/', "rule x has max_tokens, .* send the parameter max_tokens"),
        ('start: "a" <foo> /b/', 'no special token "<foo>"; write text in quotes'),
        (r"start: /a\b/", r'expression "a\\b" has \\b, \\B, \^ or \$ inside'),
        (regex_grammar("a$b"), r'expression "a\$b" has \\b'),
        (json_grammar({"pattern": r"\Ba", "type": "string"}), r'expression "\\Ba" has \\b'),
    ],
)
def test_what_a_grammar_asks_in_vain_is_named(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot be honoured: .*{reason}"):
        GRAMMARS.compile(grammar)


def test_other_options_and_attributes_of_rules_are_kept() -> None:
    grammar = '%llguidance {"allow_initial_skip": true}\n%ignore / /\nstart: x\nx[stop="temperature"]: /[a-z]+/'
    assert accepts(grammar, " abctemperature")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: missing", 'unknown name: "missing"'),
        (json_grammar({"properties": {f"k{index}": {"type": "string"} for index in range(3000)}}), "grammar size"),
        (regex_grammar("[^\\s\\S]"), "it allows no text, or"),
        (notation_grammar(r"start: /[^\s\S]/"), "it allows no text, or"),
        (
            notation_grammar('start: %json {"not": {}}'),
            r'failed to compile JSON schema: Unimplemented keys: \["not"\]\.$',
        ),
        (f"start: {'(' * 3000}A{')' * 3000}", r"1\(37\): more than about 28 parentheses are in each other"),
        (
            regex_grammar("(" * 300 + "a" + ")" * 300),
            r'honoured: the regular expression "\({60}…" is wrong: .* \(250\)',
        ),
        (regex_grammar("(a|"), r'the regular expression "\(a\|" is wrong: unclosed group\.$'),
        ("x" * 300_000, "300000 characters; at most 262144"),
    ],
)
def test_grammars_that_cannot_be_used_are_refused(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        GRAMMARS.compile(grammar)


@pytest.mark.parametrize("depth", [300, 990, 5000])
def test_deep_nesting_is_the_clients_error(depth: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"nested|recursion|in each other"):
        GRAMMARS.compile(json_grammar(functools.reduce(lambda inner, _: {"items": inner}, range(depth), {})))


def test_a_large_gbnf_grammar_is_refused_before_it_is_translated() -> None:
    chain = "root ::= r0\n" + "".join(f"r{index} ::= r{index + 1}\n" for index in range(3000))
    with pytest.raises(InvalidRequestError, match=r"at most 16384 are allowed.*Lark's notation"):
        notation_grammar(chain)


@pytest.mark.parametrize("pattern", ["\\", "ab\\", "a\\\\\\"])
def test_a_backslash_that_escapes_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="backslash"):
        regex_grammar(pattern)
    assert regex_grammar(pattern + "\\")


@pytest.mark.parametrize("number", [-9 * 10**18, 2**53 - 1, 2**62, 2**63 - 1])
def test_large_numbers_are_kept(number: int) -> None:
    assert accepts(json_grammar({"const": number}), str(number))
    assert not accepts(json_grammar({"const": number}), str(number - 1))


@pytest.mark.parametrize("key", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("number", [2**63 - 1, 2**64 - 1])
def test_upper_bounds_of_fixed_width_integers_are_allowed(key: str, number: int) -> None:
    grammar = json_grammar({"type": "integer", "minimum": 0, key: number})
    assert accepts(grammar, str(2**62))
    assert not accepts(grammar, "-1")


def test_counts_may_be_written_as_floats() -> None:
    schema = {"type": "array", "maxItems": 1.0, "items": {"type": "string", "minLength": 1.0, "maxLength": 2.0}}
    grammar = json_grammar(schema)
    assert allows_beginning(grammar, '["ab"]', GRAMMARS, TOKENIZER)
    assert not allows_beginning(grammar, '["abc', GRAMMARS, TOKENIZER)
    assert schema["maxItems"] == 1.0  # the client's object stays


def test_true_is_any_document() -> None:
    for value in ({"a": [None, True, 1.5]}, "text", 7):
        assert accepts(json_grammar(True), json.dumps(value))
