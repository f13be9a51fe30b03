"""Schemas whose documents would need another one of their kind within themselves, without end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequestError
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.endings import drop_endless
from baton.grammar.forms import json_grammar
from tests.allowed_texts import allows_beginning
from tests.random_schemas import EOS, character_tokenizer

TOKENIZER = character_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, 96, {EOS})
REF = {"$ref": "#"}


def node(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(schema: dict[str, Any], least: float = 0, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": least, **keywords}


ENDLESS = {
    "a key of itself": (node(a=REF), "#"),
    "a key beside another one": (node(kind={"enum": ["x", "y"]}, next=REF), "#"),
    "no empty array": (node(children=list_of(REF, 1)), "#"),
    "a count as a float": (node(children=list_of(REF, 2.0)), "#"),
    "a tuple": (node(pair={"type": "array", "prefixItems": [{"type": "null"}, REF], "minItems": 2}), "#"),
    "behind a tuple": (node(pair=list_of(REF, 2, prefixItems=[{"type": "null"}])), "#"),
    "two types": ({**list_of(REF, 1), **node(a=REF), "type": ["object", "array"]}, "#"),
    "every alternative": (node(a={"anyOf": [list_of(REF, 1), node(b=REF)]}), "#"),
    "all of them": (node(a={"allOf": [{"type": "object"}, REF]}), "#"),
    "through others": (
        {
            "$ref": "#/$defs/a~1b",
            "$defs": {"a/b": node(x={"$ref": "#/%24defs/c"}), "c": {"oneOf": [{"$ref": "#/$defs/a~1b"}]}},
        },
        "#/%24defs/c",
    ),
    "any of its keys": ({**node(a=REF), "required": [], "minProperties": 1, "additionalProperties": False}, "#"),
    "a key by a pattern": (
        {"type": "object", "patternProperties": {"^a$": REF}, "additionalProperties": False, "required": ["a"]},
        "#",
    ),
    "a free key": ({"type": "object", "additionalProperties": REF, "required": ["a"]}, "#"),
    "some free key": ({"type": "object", "additionalProperties": REF, "minProperties": 1}, "#"),
    "beside nothing": ({"anyOf": [False, node(a=REF)]}, "#"),
    "items of draft 7": ({"type": "array", "items": [REF], "minItems": 1}, "#"),
    "a part of it": (node(ok={"type": "null"}, a={"$ref": "#/$defs/a"}) | {"$defs": {"a": node(a=REF)}}, "#/$defs/a"),
}
ENDING: dict[str, Any] = {
    "an optional key": {**node(a=REF), "required": []},
    "null beside it": node(a={"anyOf": [REF, {"type": "null"}]}),
    "an empty array": node(children=list_of(REF)),
    "a shorter tuple": node(pair={"type": "array", "prefixItems": [{"type": "null"}, REF], "minItems": 1}),
    "another type": {**node(a=REF), "type": ["object", "null"]},
    "no type": {"properties": {"a": REF}, "required": ["a"]},
    "a constant": {**node(a=REF), "const": {"a": 1}},
    "an unused definition": {"type": "null", "$defs": {"a": node(a={"$ref": "#/$defs/a"})}},
    "an alternative": {"oneOf": [node(a=REF), {"type": "null"}]},
    "no such reference": node(a={"$ref": "#/$defs/a"}),
    "another file": node(a={"$ref": "other.json"}),
    "an anchor": node(a={"$ref": "#a"}),
    "true": True,
    "another key": {**node(a=REF, b={}), "required": [], "minProperties": 1},
    "any key": {"type": "object", "patternProperties": {"^b": REF}, "required": ["a"]},
    "no first item": {"type": "array", "items": [REF]},
    "a fraction of an item": {"type": "array", "items": [REF], "minItems": 0.0},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_a_document_that_ends_is_refused(name: str) -> None:
    schema, reference = ENDLESS[name]
    with pytest.raises(InvalidRequestError) as refused:
        GRAMMARS.compile(json_grammar(schema))
    assert f"$ref '{reference}' always leads back to itself, so that no document ends" in refused.value.message


@pytest.mark.parametrize("name", ENDING)
def test_a_schema_with_a_document_that_ends_is_not(name: str) -> None:
    drop_endless(ENDING[name])


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"properties": {"a": {}, "n": {"$ref": "#/$defs/n"}}, "type": "object"}, ["{}", '{"a": 1}']),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, ["[]"]),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"const": 1}]}, ["1"]),
        ({"type": "object", "additionalProperties": {"$ref": "#/$defs/n"}}, ["{}"]),
    ],
)
def test_a_part_that_never_ends_is_not_begun(schema: dict[str, Any], texts: list[str]) -> None:
    grammar = json_grammar({**schema, "$defs": {"n": node(n={"$ref": "#/$defs/n"})}})
    begun = ['{"n"', '{"a": 1, "n"', '[{"n"', '{"x"']
    assert [text for text in texts if allows_beginning(grammar, text, GRAMMARS, TOKENIZER)] == texts
    for text in begun:
        is_free = text == '{"x"' and "properties" in schema
        assert (GRAMMARS.compile(grammar).num_allowed([], TOKENIZER.encode(text)) == len(text)) is is_free


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=300)
def test_a_schema_ends_if_a_document_of_some_depth_does(seed: int) -> None:
    """Compared with a search for a document, which gives up at a depth that none of these schemas needs."""
    chance = random.Random(seed)
    names = [f"#/$defs/{index}" for index in range(4)]

    def part(depth: int) -> dict[str, Any]:
        if depth == 2 or chance.random() < 0.3:
            return {"$ref": chance.choice(names)} if chance.random() < 0.8 else {"type": "null"}
        inner = [part(depth + 1) for _ in range(chance.randrange(1, 3))]
        return chance.choice(
            [node(**dict(zip("ab", inner, strict=False))), list_of(inner[0], chance.randrange(2)), {"anyOf": inner}]
        )

    schema: dict[str, Any] = {"$ref": names[0], "$defs": {str(index): part(0) for index in range(4)}}

    def has_document(found: dict[str, Any], steps: int) -> bool:
        if steps == 0:
            return False
        if "$ref" in found:
            return has_document(schema["$defs"][found["$ref"][-1]], steps - 1)
        if "anyOf" in found:
            return any(has_document(each, steps) for each in found["anyOf"])
        parts = [*found.get("properties", {}).values(), *([found["items"]] if found.get("minItems") else [])]
        return all(has_document(each, steps) for each in parts)

    if has_document(schema, 10):
        drop_endless(schema)
    else:
        with pytest.raises(InvalidRequestError, match="no document ends"):
            drop_endless(schema)


def test_many_references_take_linear_time() -> None:
    count = 10_000
    chain = {str(index): node(a={"$ref": f"#/$defs/{index + 1}"}) for index in range(count)}
    wide = node(**{f"k{index}": {"$ref": f"#/$defs/{index}"} for index in range(count)})
    drop_endless({**wide, "$defs": {**chain, str(count): {"type": "null"}}})
