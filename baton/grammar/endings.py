"""JSON schemas whose documents cannot end, since each would have to contain another one of its kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from baton.core.errors import InvalidRequestError
from baton.grammar.schemas import objects_of, referred

_Node = tuple[int, str]
"""A schema, by the id of its object, or the alternatives under one of its keywords."""
_Clause = tuple[_Node, list[_Node]]
"""The first has a document that ends if all the others have."""


def check_ends(schema: Any) -> None:
    """Checks that a schema has a document which ends.

    References, ``required`` keys and ``minItems`` are followed; what several schemas demand of the same document is not
    put together. The schemas are Horn clauses: W. F. Dowling and J. H. Gallier, "Linear-time algorithms for testing the
    satisfiability of propositional Horn formulae", 1984.

    Raises:
        InvalidRequestError: it has none; the message names a reference that is the reason.
    """
    known = {id(found) for found in objects_of(schema)}
    references: dict[tuple[_Node, _Node], str] = {}
    clauses: list[_Clause] = []
    for found in objects_of(schema):
        target = referred(found.get("$ref"), schema)
        if id(target) in known:
            references[_node(found), _node(target)] = found["$ref"]
        clauses += _clauses_of(found, [_node(target)] if id(target) in known else [])
    ending = _ending(clauses)
    node = _node(schema)
    if not known or node in ending:
        return
    needed = {head: next(need for need in needs if need not in ending) for head, needs in clauses if head not in ending}
    seen: set[_Node] = set()
    while node not in seen or (node, needed[node]) not in references:  # until a reference that was passed before
        seen.add(node)
        node = needed[node]
    raise InvalidRequestError(
        f"The grammar cannot be honoured: $ref {references[node, needed[node]]!r:.100} always leads back to itself, "
        "so that no document ends. Take its key out of required, allow null beside it (anyOf), or allow an empty array."
    )


def _node(schema: Any) -> _Node:
    return id(schema), ""


def _clauses_of(schema: Mapping[str, Any], referred: list[_Node]) -> Iterable[_Clause]:
    """What a schema needs, and the alternatives that it allows.

    Args:
        referred: the schema that it refers to, if it does.
    """
    needs = [*referred, *_nodes(schema.get("allOf"))]
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and alternatives and all(isinstance(each, dict) for each in alternatives):
            needs.append((id(schema), keyword))
            yield from (((id(schema), keyword), [_node(each)]) for each in alternatives)
    kinds = schema.get("type")
    inner = [_parts_of(schema, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]
    if inner and all(inner):
        needs.append((id(schema), "type"))
        yield from (((id(schema), "type"), parts) for parts in inner)
    yield _node(schema), [] if schema.keys() & {"const", "enum"} else needs


def _parts_of(schema: Mapping[str, Any], kind: Any) -> list[_Node]:
    """The schemas of what every document of a type contains."""
    if kind == "object":
        properties = schema.get("properties")
        required = schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            return _nodes([properties.get(key) for key in required if isinstance(key, str)])
    if kind == "array" and isinstance(least := schema.get("minItems"), int | float) and least > 0:
        first = schema.get("prefixItems")
        items = first if isinstance(first, list) else []
        rest = [schema.get("items")] if least > len(items) else []
        return _nodes([*items[: int(min(least, len(items)))], *rest])
    return []


def _nodes(schemas: Any) -> list[_Node]:
    return [_node(each) for each in schemas if isinstance(each, dict)] if isinstance(schemas, list) else []


def _ending(clauses: list[_Clause]) -> set[_Node]:
    """The schemas and alternatives that have a document which ends."""
    num_left = Counter({index: len(needs) for index, (_, needs) in enumerate(clauses)})
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
