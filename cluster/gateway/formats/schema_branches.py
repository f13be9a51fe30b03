"""The alternatives that a JSON schema of one argument has, for forms that do not write JSON everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_REFERENCES = 8
"""References that lead from one to the next."""
_MAX_BRANCHES = 1000
_MAX_KEYWORDS = 100
"""Keywords of a schema that is merged with another one."""
_ASSERTING = frozenset({
    "type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then",
    "else", "dependentSchemas", "dependentRequired", "dependencies", "propertyNames", "properties", "patternProperties",
    "additionalProperties", "unevaluatedProperties", "required", "minProperties", "maxProperties", "items",
    "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems",
    "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
})  # fmt: skip
"""Keywords that may refuse a value. Others are remarks."""
_TOGETHER = (
    frozenset({"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}),
    frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems"}),
    frozenset({"contains", "minContains", "maxContains"}),
    frozenset({"if", "then", "else"}),
)
"""Keywords whose meaning depends on each other in the same schema."""
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
JSON_TYPES = (*_TYPES.values(), "null")

Schema = Mapping[str, Any]


def resolved(schema: Any, root: Schema) -> Schema:
    """``schema`` with what it refers to within ``root``, or the only part of ``allOf``, in it.

    It stays a reference if both have a keyword with different values.
    """
    found: Schema = schema if isinstance(schema, Mapping) else {}
    for _ in range(_MAX_REFERENCES):
        if isinstance(reference := found.get("$ref"), str) and reference.startswith("#/"):
            key, inner = "$ref", _find(reference, root)
        elif isinstance(parts := found.get("allOf"), list) and len(parts) == 1:
            key, inner = "allOf", parts[0]
        else:
            break
        rest = {name: value for name, value in found.items() if name != key}
        if not isinstance(inner, Mapping) or _differ(rest, inner):
            break
        found = {**inner, **rest}
    return found


def asserting(schema: Schema) -> set[str]:
    """The keywords of a schema that may refuse a value."""
    return set(_ASSERTING & schema.keys())


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The alternatives of a schema.

    Attributes:
        branches: a schema for each, with at most one type. What cannot be taken apart is one of them.
        is_exclusive: whether a value must not follow several of them.
    """

    branches: Sequence[Schema]
    is_exclusive: bool

    @property
    def types(self) -> list[str]:
        """The JSON types of all of them; empty if they name none."""
        found: list[str] = []
        for branch in self.branches:
            kind, options = branch.get("type"), options_of(branch)
            found += [kind] if isinstance(kind, str) else [type_of(option) for option in options or ()]
        return list(dict.fromkeys(found))


def alternatives_of(schema: Schema) -> Alternatives:
    """The alternatives of ``anyOf``, ``oneOf`` and ``type``. References are those within ``schema``."""
    left, found, is_exclusive, num_seen = [resolved(schema, schema)], list[Schema](), False, 0
    while left:
        each = left.pop()
        num_seen += 1
        key = next((key for key in ("anyOf", "oneOf") if isinstance(each.get(key), list)), "")
        options = each.get(key) or ()
        rest = {name: value for name, value in each.items() if name != key}
        is_small = num_seen + len(left) + len(options) <= _MAX_BRANCHES  # references may form a circle
        parts = [resolved(option, schema) for option in options] if is_small else []
        if parts and not any(_differ(part, rest) for part in parts):
            is_exclusive |= key == "oneOf"
            left += [resolved({**rest, **part}, schema) for part in reversed(parts)]
        else:
            kinds = each.get("type")
            found += [{**each, "type": kind} for kind in kinds] if isinstance(kinds, list) else [each]
    return Alternatives(found, is_exclusive)


def options_of(schema: Schema) -> list[Any] | None:
    """The values of ``enum`` or ``const``; ``None`` if a schema has neither."""
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) else None


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    return _TYPES.get(type(value), "null")


def _differ(one: Schema, other: Schema) -> bool:
    """Whether the two cannot be one schema: both have a keyword with different values, or parts of what belongs
    together, or they are too large to be compared."""
    if len(one) + len(other) > _MAX_KEYWORDS:
        return True
    keys, others = asserting(one), asserting(other)
    return any(one[key] != other[key] for key in keys & others) or any(
        group & keys and group & others for group in _TOGETHER
    )


def _find(reference: str, root: Any) -> Any:
    target = root
    for part in reference.removeprefix("#/").split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target
