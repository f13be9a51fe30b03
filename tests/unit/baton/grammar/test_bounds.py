"""Grammars whose compilation or use would end the process, or take too long."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.core.errors import InvalidRequestError
from baton.grammar.bounds import MAX_MULTIPLE_OF, MAX_PATTERN_PROPERTIES, MAX_RULE_DEPTH, check_bounds
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import json_grammar, notation_grammar, regex_grammar
from tests.random_schemas import EOS, character_tokenizer

TOKENIZER = character_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, 96, {EOS})
PATTERNS = {f"^a{index}": {"type": "integer"} for index in range(MAX_PATTERN_PROPERTIES + 1)}


def chain(length: int, link: Callable[[Any], Any]) -> str:
    definitions = {f"d{index}": link({"$ref": f"#/$defs/d{index + 1}"}) for index in range(length)}
    definitions[f"d{length}"] = {"type": "integer"}
    return json_grammar({"$defs": definitions, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(
    "grammar",
    [chain(6000, lambda link: link), chain(4000, lambda link: {"allOf": [link]})],
    ids=["references", "allOf"],
)
def test_long_chains_of_references_are_compiled(grammar: str) -> None:
    assert GRAMMARS.compile(grammar).allowed([]) is not None


@pytest.mark.parametrize(
    "link", [lambda link: {"properties": {"a": link}}, lambda link: {"type": "array", "items": link}]
)
def test_chains_that_are_too_long_are_refused(link: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidRequestError, match="grammar size"):
        GRAMMARS.compile(chain(2500, link))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "multipleOf": MAX_MULTIPLE_OF + 1}, "multipleOf is 10001; at most 10,000"),
        ({"properties": {"a": {"items": [{"multipleOf": 1e9}]}}}, "multipleOf"),
        ({"const": 2**53 + 1}, r"const has a whole number that would be rounded. Use one from -\(2\^53 - 1\) to"),
        ({"enum": [1, {"a": [2**63]}]}, "enum has a whole number that would be rounded"),
        ({"type": "integer", "exclusiveMinimum": -(2**53) - 1}, "exclusiveMinimum has a whole number that would be"),
        ({"const": -(2**63)}, "const has a number below -9,000,000,000,000,000,000"),
        ({"anyOf": [{"enum": [1, {"a": [-(2**63) + 99]}]}]}, "enum has a number below"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -1e30}, "maximum has a number below"),
        ({"allOf": [{"minimum": -1e20}, {"exclusiveMaximum": -1e20}]}, "exclusiveMaximum has a number below"),
        ({"properties": {"default": {"multipleOf": 1e9}}}, "multipleOf"),
        ({"default": {"const": -(2**63)}, "$ref": "#/default"}, "leads to what is not a schema"),
        ({"examples": [{"const": -(2**63)}], "items": {"$ref": "#/ex%61mples/0"}}, "leads to what is not a schema"),
        ({"properties": {"const": -(2**63)}, "$ref": "#/properties"}, "leads to what is not a schema"),
        ({"type": "object", "patternProperties": PATTERNS}, "patternProperties has 101 patterns; at most 100"),
    ],
)
@pytest.mark.parametrize("space", ["", " ", "\n\t"])
def test_dangerous_keywords_are_bounded_in_schemas_and_grammars(
    schema: dict[str, Any], reason: str, space: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        GRAMMARS.compile(json_grammar(schema))
    with pytest.raises(InvalidRequestError, match=reason):
        GRAMMARS.compile(notation_grammar(f'start: "a" x\nx: %json{space}{json.dumps(schema)}\n'))


def test_data_and_names_are_no_keywords() -> None:
    schema = {
        "enum": [{"multipleOf": 10**9}],
        "properties": {"multipleOf": {"$ref": "#/$defs/maximum"}, "const": {"default": -(2**63)}},
        "$defs": {"maximum": {"minimum": -(2**63)}},
    }
    check_bounds([{"json_schema": schema}, {"lark_grammar": "start: %json not a schema"}])


def rule_chain(length: int, name: str, end: str) -> str:
    """Rules, each of which leads to the next; they stand in the reverse order."""
    rules = [f'{name}{index}: "b" {name}{index + 1} | "a: {name}0"  // {name}0' for index in range(length - 1)]
    return "\n".join([f"{name}{length - 1}: {end}", *reversed(rules), f"start: {name}0"])


@pytest.mark.parametrize("name", ["rule", "TERMINAL"])
def test_chains_of_rules_are_bounded(name: str) -> None:
    GRAMMARS.compile(notation_grammar(rule_chain(MAX_RULE_DEPTH - 1, name, '"a"')))
    with pytest.raises(InvalidRequestError, match=rf"more than 500 rules lead to each other from start to {name}499"):
        GRAMMARS.compile(notation_grammar(rule_chain(MAX_RULE_DEPTH, name, '"a"')))


def test_rules_that_no_other_leads_to_are_bounded() -> None:
    unused = 'start: "a"\nother: r0\n' + rule_chain(MAX_RULE_DEPTH, "r", '"a"').replace("start: r0", "")
    with pytest.raises(InvalidRequestError, match="more than 500 rules"):
        GRAMMARS.compile(notation_grammar(unused))


def test_many_rules_beside_each_other_are_no_chain() -> None:
    rules = "\n".join(f'r{index}: "a" | /b:r1|"/ /r2:/' for index in range(1000))
    GRAMMARS.compile(notation_grammar("start: " + " | ".join(f"r{index}" for index in range(1000)) + "\n" + rules))


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('start: ~"a"', "start"),
        ("start: T\nT: ~/a/ | /b/", "T"),
        ("%ignore ~/a/\nstart: T\nT: /b/", "%ignore"),
        ("start: T\nT.2: ~/a/\nT: /b/", "T"),
        ("start: T\nT: ~/a/ & ~/b/", "T"),
        ('start: T\nT: /[ab]/ & "x" ~"a"', "T"),
        ("start: A\nA: /x/ & B\nB:~ /y/", "B"),
        ("start: T\nT: /[ab]/ & (~/a/)", "T"),
    ],
)
def test_a_negation_without_an_intersection_is_refused(grammar: str, rule: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"in the rule {rule}: ~ must follow &, as in"):
        GRAMMARS.compile(notation_grammar(grammar))


@pytest.mark.parametrize("word", ["/[ab]/ & ~/a|c/", '/[ab]/ &  ~("a" | "c")', '/~[ab]/ "~"~2..3 & ~/c/ & ~"~a~~"'])
def test_a_negation_in_an_intersection_is_kept(word: str) -> None:
    grammar, head = notation_grammar(f"start: T  // ~\nT: {word}"), "~" if "~2" in word else ""
    for letter, is_right in (("a", False), ("b", True), ("c", False)):
        tokens = TOKENIZER.encode(f"{head}{letter}{head * 2}")
        state = GRAMMARS.compile(grammar)
        allowed = state.allowed(tokens) if state.num_allowed([], tokens) == len(tokens) else None
        assert is_right is (allowed is not None and bool(allowed[EOS // 32] >> EOS % 32 & 1))


@pytest.mark.parametrize(
    "text",
    ["x" * 200_000, "\\/" * 100_000, '"\\' * 100_000, "[?!" * 60_000, "\n?" * 100_000, " ~2" * 60_000, " " * 200_000],
)
def test_the_check_of_rules_takes_linear_time(text: str) -> None:
    check_bounds([{"lark_grammar": f"start: /a\n{text}"}])


def test_a_grammar_that_becomes_too_complex_is_the_clients_error() -> None:
    grammar, output = regex_grammar("((a{1000}){1000}){1000}"), TOKENIZER.encode("a")
    state = GRAMMARS.compile(grammar)
    state.allowed(output)
    assert isinstance(state.error, InvalidRequestError)
    assert "became too complex" in state.error.message
    with pytest.raises(InvalidRequestError, match="became too complex"):
        GRAMMARS.compile(grammar, output)
