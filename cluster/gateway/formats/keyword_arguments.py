"""Arguments that are written one by one, for grammars of forms other than JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.gateway.formats.grammar import literal


def properties_of(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Schema of each argument, with the definitions that it may refer to. Required ones come first."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = schema.get("properties") or {}
    required = [name for name in schema.get("required") or () if name in found]
    order = [*required, *(name for name in found if name not in required)]
    return {name: {**_resolved(found[name], schema), **shared} for name in order}


def _resolved(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """``value``, or what it refers to within the function's schema."""
    reference = value.get("$ref") if isinstance(value, Mapping) else None
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = schema
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        value = target
    return value if isinstance(value, Mapping) else {}


def keyword_rules(
    name: str, schema: Mapping[str, Any], write: Callable[[str, Mapping[str, Any]], str], any_item: str, separator: str
) -> str:
    """Rules of ``name``: arguments in a fixed order, of which only the required ones must be there.

    Args:
        write: the rule of one argument, from its name and schema.
        any_item: the rule of an argument where the schema names none.
    """
    if "properties" not in schema:
        return f"{name}: ({any_item} ({literal(separator)} {any_item})*)?\n"
    properties = properties_of(schema)
    required = set(schema.get("required") or ())
    rules = [f"{name}: {name}_first_0\n"]
    for index, (key, value) in enumerate(properties.items()):
        rules.append(f"{name}_{index}: {write(key, value)}\n")
        item, rest = f"{name}_{index} {name}_more_{index + 1}", f"{name}_first_{index + 1}"
        rules.append(f"{name}_first_{index}: {item}" + ("" if key in required else f" | {rest}") + "\n")
        more = f"{literal(separator)} {item}" if separator else item
        optional = "" if key in required else f" | {name}_more_{index + 1}"
        rules.append(f"{name}_more_{index}: {more}{optional}\n")
    end = len(properties)
    return "".join([*rules, f'{name}_first_{end}: ""\n', f'{name}_more_{end}: ""\n'])


def types_of(schema: Mapping[str, Any] | None) -> Sequence[str]:
    """JSON types that a schema names; empty if it allows any."""
    if not isinstance(schema, Mapping):
        return ()
    found = schema.get("type")
    types = [found] if isinstance(found, str) else list(found or ())
    for key in ("anyOf", "oneOf"):
        types += [kind for option in schema.get(key) or () for kind in types_of(option)]
    if not types and isinstance(schema.get("enum"), list) and all(isinstance(item, str) for item in schema["enum"]):
        return ("string",)
    return types
