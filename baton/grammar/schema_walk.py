"""How to find one's way in a JSON schema: its parts, references, and keywords that may refuse a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

DATA_KEYS = frozenset({"const", "default", "enum", "examples"})
"""Keys of a schema whose values are data instead of schemas."""
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keys of a schema whose values are objects of schemas by names, which may look like keywords."""

_MAX_REFERENCES = 8
"""References that lead from one to the next."""
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

Schema = Mapping[str, Any]


def objects_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas in a schema that are objects. Each may be changed before the next one is asked for."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            yield value
            for key, inner in value.items():
                if key in NAMED_SCHEMAS and isinstance(inner, dict):
                    left += inner.values()
                elif key not in DATA_KEYS:
                    left.append(inner)


def referred(reference: Any, schema: Any) -> Any:
    """What a reference within the schema leads to; ``None`` if it leads elsewhere or nowhere."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = schema
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


def resolved(schema: Any, root: Schema) -> Schema:
    """``schema`` with what it refers to within ``root``, or the only part of ``allOf``, in it.

    It stays a reference if both have a keyword with different values.
    """
    found: Schema = schema if isinstance(schema, Mapping) else {}
    for _ in range(_MAX_REFERENCES):
        if isinstance(reference := found.get("$ref"), str) and reference.startswith("#/"):
            key, inner = "$ref", referred(reference, root)
        elif isinstance(parts := found.get("allOf"), list) and len(parts) == 1:
            key, inner = "allOf", parts[0]
        else:
            break
        rest = {name: value for name, value in found.items() if name != key}
        if not isinstance(inner, Mapping) or differ(rest, inner):
            break
        found = {**inner, **rest}
    return found


def asserting(schema: Schema) -> set[str]:
    """The keywords of a schema that may refuse a value."""
    return set(_ASSERTING & schema.keys())


def options_of(schema: Schema) -> list[Any] | None:
    """The values of ``enum`` or ``const``; ``None`` if a schema has neither."""
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) else None


def differ(one: Schema, other: Schema) -> bool:
    """Whether the two cannot be one schema: both have a keyword with different values, or parts of what belongs
    together, or they are too large to be compared."""
    if len(one) + len(other) > _MAX_KEYWORDS:
        return True
    keys, others = asserting(one), asserting(other)
    return any(one[key] != other[key] for key in keys & others) or any(
        group & keys and group & others for group in _TOGETHER
    )
