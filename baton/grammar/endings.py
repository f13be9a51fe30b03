"""JSON schemas whose documents cannot end, since each would have to contain another one of its kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from baton.grammar.refusals import refusal
from baton.grammar.schema_walk import objects_of, referred

_Node = tuple[int, str]
"""A schema, by the id of its object, or the alternatives under one of its keywords."""
_Clause = tuple[_Node, list[_Node]]
"""The first has a document that ends if all the others have."""


def drop_endless(schema: Any) -> None:
    """Makes the parts of a schema that have no document which ends allow nothing at all.

    References, required keys and least numbers are followed; what several schemas demand of the same document is not
    put together. The schemas are Horn clauses: W. F. Dowling and J. H. Gallier, "Linear-time algorithms for testing the
    satisfiability of propositional Horn formulae", 1984.

    Raises:
        InvalidRequestError: the schema itself has none; the message names a reference that is the reason.
    """
    known = {id(found) for found in objects_of(schema)}
    if not known:
        return
    references: dict[tuple[_Node, _Node], str] = {}
    clauses: list[_Clause] = []
    for found in objects_of(schema):
        target = referred(found.get("$ref"), schema)
        if id(target) in known:
            references[_node(found), _node(target)] = found["$ref"]
        clauses += _clauses_of(found, [_node(target)] if id(target) in known else [])
    ending = _ending(clauses)
    node = _node(schema)
    if node in ending:
        for found in objects_of(schema):
            if _node(found) not in ending:
                found.pop("$ref", None)
                found["enum"] = []
        return
    needed = {head: next(need for need in needs if need not in ending) for head, needs in clauses if head not in ending}
    seen: set[_Node] = set()
    while node not in seen or (node, needed[node]) not in references:  # until a reference that was passed before
        seen.add(node)
        node = needed[node]
    raise refusal(
        f"$ref {references[node, needed[node]]!r:.100} always leads back to itself, "
        "so that no document ends. Take its key out of required, allow null beside it (anyOf), or allow an empty array."
    )


def _node(schema: Any) -> _Node:
    return id(schema), ""


def _clauses_of(schema: Mapping[str, Any], targets: list[_Node]) -> Iterable[_Clause]:
    """What a schema needs, and the alternatives that it allows.

    Args:
        targets: the schema that it refers to, if it does.
    """
    needs = [*targets, *_nodes(schema.get("allOf"))]
    for keyword in ("anyOf", "oneOf"):
        given = schema.get(keyword)
        alternatives = [each for each in given if each is not False] if isinstance(given, list) else []
        if alternatives and all(isinstance(each, dict) for each in alternatives):
            needs.append((id(schema), keyword))
            yield from (((id(schema), keyword), [_node(each)]) for each in alternatives)
    kinds = schema.get("type")
    inner = [_parts_of(schema, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]
    if inner and all(inner):
        needs.append((id(schema), "type"))
        for kind, parts in enumerate(inner):
            groups = [(id(schema), f"type {kind} {index}") for index in range(len(parts))]
            yield (id(schema), "type"), groups
            yield from ((group, [each]) for group, part in zip(groups, parts, strict=True) for each in part)
    yield _node(schema), [] if schema.keys() & {"const", "enum"} else needs


def _parts_of(schema: Mapping[str, Any], kind: Any) -> list[list[_Node]]:
    """What every document of a type contains: for each part its possible schemas."""
    if kind == "object":
        return _values_of(schema)
    if kind == "array" and _is_positive(least := schema.get("minItems")):
        first = schema.get("prefixItems", schema.get("items"))
        items = first if isinstance(first, list) else []
        rest = schema.get("additionalItems" if isinstance(schema.get("items"), list) else "items")
        parts = [*items[: int(min(least, len(items)))], *([rest] if least > len(items) else [])]
        return [nodes for part in parts if (nodes := _nodes([part]))]
    return []


def _values_of(schema: Mapping[str, Any]) -> list[list[_Node]]:
    """The possible schemas of each value that an object must have."""
    given, patterns = schema.get("properties"), schema.get("patternProperties")
    properties = given if isinstance(given, dict) else {}
    free = [*(patterns.values() if isinstance(patterns, dict) else []), schema.get("additionalProperties", True)]
    required = schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    values = [[properties[name]] if name in properties else free for name in names]
    if not names and _is_positive(schema.get("minProperties")):
        values = [[*properties.values(), *free]]
    possible = [[each for each in value if each is not False] for value in values]
    return [_nodes(value) for value in possible if value and all(isinstance(each, dict) for each in value)]


def _is_positive(number: Any) -> TypeGuard[float]:
    return isinstance(number, int | float) and number > 0


def _nodes(schemas: Any) -> list[_Node]:
    return [_node(each) for each in schemas if isinstance(each, dict)] if isinstance(schemas, list) else []


def _ending(clauses: list[_Clause]) -> set[_Node]:
    """The schemas and alternatives that have a document which ends."""
    num_left = [len(needs) for _, needs in clauses]
    waiting: dict[_Node, list[int]] = defaultdict(list)
    for index, (_, needs) in enumerate(clauses):
        for need in needs:
            waiting[need].append(index)
    ending: set[_Node] = set()
    new = [head for head, needs in clauses if not needs]
    while new:
        node = new.pop()
        if node in ending:
            continue
        ending.add(node)
        for index in waiting[node]:
            num_left[index] -= 1
            if not num_left[index]:
                new.append(clauses[index][0])
    return ending
