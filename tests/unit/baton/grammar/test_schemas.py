"""Schemas that llguidance alone would take too widely: a grammar allows no document that its schema does not."""

from __future__ import annotations

import datetime
import itertools
import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequestError
from baton.grammar.bounds import check_bounds
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import json_grammar, notation_grammar
from baton.grammar.schemas import rewrite_schemas
from tests.allowed_texts import allows_beginning
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, TOKENIZER.vocab_size, {0})
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDS = (-1.5, -1, -0.5, 0, 0.05, 0.5, 1, 1.8, 2, 100, 100.25)
FAR_BOUNDS = (
    1e-300,
    -1e-300,
    0.3,
    0.1 + 0.2,
    -4374.748583102679,
    85.12343601672721,
    1e15,
    2**50,
    2**53 - 1,
    1e16,
    -1e16,
    1e17,
)
DATES = [
    f"{year:04}-{month:02}-{day:02}"
    for year in (0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 9996, 9999)
    for month in range(14)
    for day in (0, 1, 28, 29, 30, 31, 32)
]


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar allows this text as a whole."""
    if not allows_beginning(grammar, text, GRAMMARS, TOKENIZER):
        return False
    allowed = GRAMMARS.compile(grammar).allowed(TOKENIZER.encode(text))
    return allowed is not None and bool(allowed[0] & 1)  # the token 0 ends a text


def is_valid(schema: Any, text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


def refuse(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        GRAMMARS.compile(json_grammar(schema))


def numbers_near(bounds: tuple[float, ...]) -> list[str]:
    """Texts of numbers: the bounds and others around them, with and without further zeros."""
    texts = {"0", "-0", "0.0", "-0.0", *(str(math.floor(bound) + step) for bound in bounds for step in (-1, 0, 1, 2))}
    for bound, step in itertools.product(bounds, (0, 1, 0.25, 0.01, 1e-6)):
        for number in {Decimal(repr(bound)) + Decimal(repr(step)), Decimal(repr(bound)) - Decimal(repr(step))}:
            text = format(number, "f")
            texts |= {text, text + ("0" if "." in text else ".0")}
    return sorted(texts)


def compiled(schema: Any) -> str:
    """The schema's grammar; empty if the schema allows nothing."""
    grammar = json_grammar(schema)
    try:
        GRAMMARS.compile(grammar)
    except InvalidRequestError:
        return ""
    return grammar


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("low", [None, *LOWER])
@pytest.mark.parametrize("high", [None, *UPPER])
def test_numbers_are_within_their_bounds(kind: str, low: str | None, high: str | None) -> None:
    for least, most in itertools.combinations(BOUNDS, 2):
        schema = {"type": kind} | ({low: least} if low else {}) | ({high: most} if high else {})
        grammar, texts = compiled(schema), numbers_near((least, most))
        accepted = [text for text in texts if grammar and accepts(grammar, text)]
        assert all(is_valid(schema, text) for text in accepted)
        assert accepted or not any(is_valid(schema, text) for text in texts)


@pytest.mark.parametrize("key", [*LOWER, *UPPER])
@pytest.mark.parametrize("bound", FAR_BOUNDS)
@pytest.mark.parametrize("kind", ["number", "integer"])
def test_bounds_with_many_digits_are_kept(key: str, bound: float, kind: str) -> None:
    schema = {"type": kind, key: bound}
    beside = {math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf)}
    texts = [format(Decimal(repr(number)), "f").removesuffix(".0") for number in (bound, *beside)]
    texts += [str(int(bound) + step) for step in (-1000, -1, 0, 1, 1000)]
    accepted = [text for text in texts if accepts(json_grammar(schema), text)]
    assert accepted
    assert all(is_valid(schema, text) for text in accepted)


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.sampled_from(LOWER), st.sampled_from(UPPER))
@settings(deadline=None, max_examples=150)
def test_random_bounds_are_kept(first: float, second: float, low: str, high: str) -> None:
    schema = {"type": "number", low: min(first, second), high: max(first, second)}
    grammar = compiled(schema)
    for number in (first, second, *(math.nextafter(bound, end) for bound in (first, second) for end in (-1e99, 1e99))):
        text = format(Decimal(repr(number)), "f")
        assert not grammar or not accepts(grammar, text) or is_valid(schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"$defs": {"a": {"exclusiveMinimum": 0}}, "$ref": "#/$defs/a", "maximum": 0.5, "type": "number"},
        {"type": "number", "exclusiveMinimum": True, "minimum": 0, "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.6, "multipleOf": 0.1},
    ],
)
def test_an_exclusive_bound_meets_others(schema: dict[str, Any]) -> None:
    grammar = json_grammar(schema)
    assert accepts(grammar, "0.1")
    assert accepts(grammar, "0.5")
    for text in ("0", "0.0", "-0", "0.6", "-0.1"):
        assert not accepts(grammar, text)


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMinimum", "maximum", "const"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_what_is_no_finite_number_is_refused_in_rules(keyword: str, number: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{keyword} has a number that is too large"):
        check_bounds([{"lark_grammar": f'start: %json {{"{keyword}": {number}}}'}])


def test_many_bounds_take_linear_time() -> None:
    properties = {f"k{index}": {"type": "number", "exclusiveMinimum": 3 * index} for index in range(100_000)}
    rewrite_schemas({"json_schema": {"properties": properties}})  # more than ten minutes if each meets each other


def test_schemas_in_rules_are_rewritten() -> None:
    schemas = [{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, {"type": "string", "format": "date"}]
    first, second = map(json.dumps, schemas)
    grammar = notation_grammar(f'start: x "|" y // %json no schema\nx: %json {first}\ny: %json{second}\n')
    assert accepts(grammar, '0.5|"2024-02-29"')
    assert not accepts(grammar, '0|"2024-02-29"')
    assert not accepts(grammar, '0.5|"2023-02-29"')


@pytest.mark.parametrize("number", [0.1 + 0.2, -8.370639980055117e-14])
def test_constants_that_would_be_rounded_are_refused(number: float) -> None:
    refuse({"enum": ["a", [number]]}, "enum has the number .* up to 15 digits")
    assert accepts(json_grammar({"const": 0.1}), "0.1")


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        OPEN,
        {**OPEN, "required": ["a"], "additionalProperties": {"type": "string"}},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        {"allOf": [OPEN, {"additionalProperties": True}]},
        {"type": "array", "items": OPEN},
    ],
)
def test_a_listed_key_has_one_spelling_and_comes_once(schema: dict[str, Any]) -> None:
    grammar = json_grammar(schema)
    for document in ('{"a": 1, "b": "x"}', '{"a": 1, "\\"\\n\\\\": "\\t\\""}', '{"a": 1, "é": "日本"}'):
        assert accepts(grammar, f"[{document}]" if "items" in schema else document)
    for document in ('{"a": "x"}', '{"\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}', '{"a": 1, "a": "x"}'):
        assert not accepts(grammar, f"[{document}]" if "items" in schema else document)


def test_control_characters_stay_where_all_keys_are_listed() -> None:
    assert accepts(json_grammar({**OPEN, "properties": {"a": {}}, "additionalProperties": False}), '{"a": "\\u001b"}')
    assert accepts(json_grammar({"type": "string"}), '"\\u001b"')


@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": {"type": "integer"}, "minProperties": 3},
        {**OPEN, "required": ["a", "a"], "minProperties": 3},
        {"patternProperties": {"^k": True}, "additionalProperties": False, "minProperties": 2},
        {"allOf": [{"required": ["a", "b"]}, {"minProperties": 2}]},
        {"type": ["object", "null"], "minProperties": 2.0},
    ],
)
def test_repeated_keys_cannot_reach_the_least_number(schema: dict[str, Any]) -> None:
    refuse(schema, r"minProperties is .* could be repeated .* List the keys in required")


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "object", "minProperties": 1}, '{"x": 1}', "{}"),
        ({**OPEN, "required": ["a"], "minProperties": 2}, '{"a": 1, "b": 2}', '{"a": 1}'),
        ({"type": "object", "required": ["a", "b"], "minProperties": 2}, '{"a": 1, "b": 2}', '{"a": 1, "c": 2}'),
        ({**OPEN, "additionalProperties": False, "minProperties": 1}, '{"a": 1}', "{}"),
        ({"type": "object", "maxProperties": 1}, '{"x": 1}', '{"x": 1, "y": 1}'),
        ({"type": ["array"], "minProperties": 5}, "[]", "{}"),
    ],
)
def test_numbers_of_properties_that_are_kept(schema: dict[str, Any], allowed: str, refused: str) -> None:
    assert accepts(json_grammar(schema), allowed)
    assert not accepts(json_grammar(schema), refused)


def is_read_by(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("end", ["", "T23:59:59Z", "T00:00:00.25+05:30", "T24:00:00Z", "T12:00:60Z", "T12:00:00"])
def test_dates_are_those_of_the_calendar(end: str) -> None:
    name = "date-time" if end else "date"
    grammar = json_grammar({"type": "string", "format": name})
    read = datetime.datetime.fromisoformat if end else datetime.date.fromisoformat
    has_zone = not end or end[-1] == "Z" or "+" in end
    for date in DATES:
        assert accepts(grammar, f'"{date}{end}"') is (has_zone and is_read_by(read, date + end)), date


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("time", ["23:59:59Z", "01:02:03.004-23:59"], ["24:00:00Z", "23:60:00Z", "12:00:00", "12:00:00+24:00"]),
        ("hostname", ["a", "a-b.example", "1.2", f"{'a' * 63}.b"], ["-a", "a-", "a..b", "ab--c.d", "a_b", "a" * 64]),
        ("hostname", [".".join(["a" * 61] * 4)], [".".join(["a" * 63] * 4)]),
        ("email", ["a@b", "a.b+c@d.example", "a@[127.0.0.1]"], ["a", "@b", ".a@b", "a@b@c", "a@[256.0.0.1]", "a@-b"]),
        ("email", [f"{'a' * 64}@b"], [f"{'a' * 65}@b", f"a@{'b' * 64}", "a@xn--b"]),
    ],
)
def test_formats(name: str, valid: list[str], invalid: list[str]) -> None:
    grammar = json_grammar({"type": "string", "format": name})
    assert [text for text in valid + invalid if accepts(grammar, f'"{text}"')] == valid


def test_a_format_meets_other_keywords() -> None:
    grammar = json_grammar({"format": "date", "pattern": "^2024", "allOf": [{"pattern": "29$"}], "minLength": 1})
    assert accepts(grammar, '"2024-02-29"')
    assert accepts(grammar, "null")
    assert not accepts(grammar, '"2024-02-28"')
    assert not accepts(grammar, '"2020-02-29"')


def test_a_format_that_is_too_complex_beside_a_pattern_is_refused() -> None:
    pattern = r"^\w+([\.-]?\w+)*@\w+([\.-]?\w+)*(\.\w{2,})+$"
    refuse({"type": "string", "format": "email", "pattern": pattern}, "too complex together; leave one of them out")


def test_a_deep_schema_in_a_rule_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequestError, match="in each other"):
        GRAMMARS.compile(notation_grammar("start: %json " + '{"items":' * 3000 + "true" + "}" * 3000))


@pytest.mark.parametrize(
    "keyword",
    [
        {"uniqueItems": False},
        {"propertyNames": True},
        {"unevaluatedItems": {}},
        {"dependentRequired": {}},
        {"not": False},
        {"minItems": 0.0},
    ],
)
def test_keywords_that_allow_everything_are_accepted(keyword: dict[str, Any]) -> None:
    assert accepts(json_grammar({"type": "array", **keyword}), "[1, 1]")


@pytest.mark.parametrize("keyword", [{"uniqueItems": True}, {"propertyNames": False}, {"uniqueItems": 0}, {"not": {}}])
def test_keywords_with_a_meaning_are_still_refused(keyword: dict[str, Any]) -> None:
    refuse({"type": "array", **keyword}, "Unimplemented keys")


@pytest.mark.parametrize(
    "reference", ["#/properties", "#/$defs/a/enum/0", "#/%24defs/a/default", "http://a/b#/$defs/a/const", "#/$defs"]
)
def test_references_to_data_are_refused(reference: str) -> None:
    refuse({"properties": {"b": {"$ref": reference}}, "$defs": {"a": {"enum": [{}]}}}, "leads to what is not a schema")


def test_names_may_be_those_of_keywords() -> None:
    definitions = {"enum": {"type": "integer"}, "properties": {"$ref": "#/$defs/enum"}}
    schema = {"$defs": definitions, "properties": {"const": {"$ref": "#/$defs/properties"}}, "required": ["const"]}
    assert accepts(json_grammar({"type": "object", **schema}), '{"const": 1}')
    assert not accepts(json_grammar({"type": "object", **schema}), '{"const": "a"}')


def test_data_is_not_rewritten() -> None:
    document = {"exclusiveMinimum": 0, "maximum": 0.5, "uniqueItems": False, "format": "date"}
    assert accepts(json_grammar({"const": document}), json.dumps(document))
