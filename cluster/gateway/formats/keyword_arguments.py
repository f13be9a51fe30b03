"""Arguments that are written one by one, for grammars of forms other than JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from baton.core.errors import InvalidRequestError
from baton.grammar.compiler import MAX_GRAMMAR_CHARS
from baton.grammar.refusals import refusal
from baton.grammar.schema_walk import Schema, asserting, resolved
from cluster.gateway.formats.base import CallRule
from cluster.gateway.formats.grammar import literal

_KEPT = frozenset({"type", "properties", "required", "additionalProperties", "unevaluatedProperties"})
"""What a list of arguments keeps to: it has no others than the known ones."""


Write = Callable[[str, str, Schema], tuple[str, str]]
"""See :func:`keyword_rules`."""


def properties_of(schema: Schema) -> dict[str, Schema]:
    """Schema of each argument, with the definitions that it may refer to. Required ones come first."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    schema = {**resolved(schema, schema), **shared}
    properties, required = schema.get("properties"), schema.get("required")
    found: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    allowed = (name for name, value in found.items() if value is not False)
    names = dict.fromkeys([*(required if _are_names(required) else ()), *allowed])
    return {name: {**resolved(found.get(name), schema), **shared} for name in names}


def keyword_rules(rule: CallRule, write: Write, any_item: str, separator: str) -> str:
    """Rules ``arguments_0``, ``arguments_1``, … of the functions' arguments, which stand in a fixed order. Only the
    required ones must be there.

    Args:
        write: the expression of one argument, and the rules that it needs, from a name for these, its key and its
            schema.
        any_item: the rule of an argument where the schema names none.

    Raises:
        InvalidRequestError: a keyword of a function's schema cannot be honoured, or the rules become too long.
    """
    num_chars = 0

    def counted(name: str, key: str, schema: Schema) -> tuple[str, str]:
        nonlocal num_chars
        argument, further = write(name, key, schema)
        num_chars += len(argument) + len(further)
        if num_chars > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"The grammar has more than {MAX_GRAMMAR_CHARS} characters, with what each argument refers to. Make "
                "the schemas of the functions smaller.",
                param="tools",
            )
        return argument, further

    rules = []
    for index, function in enumerate(rule.functions):
        try:
            rules.append(_rules_of(f"arguments_{index}", rule.schema_of(function), counted, any_item, separator))
        except InvalidRequestError as error:
            raise function.refused(error) from error
    return "".join(rules)


def _rules_of(name: str, schema: Schema, write: Write, any_item: str, separator: str) -> str:
    schema = resolved(schema, schema)
    _check_forms(schema)
    properties, required = properties_of(schema), set(schema.get("required") or ())
    _check_keywords(schema, len(properties), required)
    if "properties" not in schema and not required and schema.get("additionalProperties") is not False:
        return f"{name}: ({any_item} ({literal(separator)} {any_item})*)?\n"
    rules = [f"{name}: {name}_first_0\n"]
    for index, (key, value) in enumerate(properties.items()):
        argument, further = write(f"{name}_{index}", key, value)
        rules.append(f"{name}_{index}: {argument}\n{further}")
        item, rest = f"{name}_{index} {name}_more_{index + 1}", f"{name}_first_{index + 1}"
        rules.append(f"{name}_first_{index}: {item}" + ("" if key in required else f" | {rest}") + "\n")
        more = f"{literal(separator)} {item}" if separator else item
        optional = "" if key in required else f" | {name}_more_{index + 1}"
        rules.append(f"{name}_more_{index}: {more}{optional}\n")
    end = len(properties)
    return "".join([*rules, f'{name}_first_{end}: ""\n', f'{name}_more_{end}: ""\n'])


def unkept_key(key: str) -> InvalidRequestError:
    return refusal(
        f"a model's calls cannot have the argument {key!r:.100}. Rename it.",
        param="tools",
    )


def _check_forms(schema: Schema) -> None:
    for key, is_right, expected in (
        ("properties", isinstance(schema.get("properties", {}), Mapping), "an object of schemas"),
        ("required", _are_names(schema.get("required", [])), "a list of names"),
    ):
        if not is_right:
            raise InvalidRequestError(f"{key} of a function's parameters must be {expected}.", param="tools")


def _are_names(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check_keywords(schema: Schema, num_arguments: int, required: set[str]) -> None:
    unkept = asserting(schema) - _KEPT
    if _is_at_most(schema.get("minProperties"), len(required)):
        unkept.discard("minProperties")
    if _is_at_most(num_arguments, schema.get("maxProperties")):
        unkept.discard("maxProperties")
    others = schema.get("additionalProperties", True)
    known = schema.get("properties") or {}
    if any(known.get(name, others) is False for name in required):
        unkept.add("required, which has keys that are forbidden,")
    elif others not in (True, False, {}) and (required or "properties" not in schema):
        unkept.add("additionalProperties as a schema")
    if _refers_to_the_whole(schema):
        unkept.add('"$ref": "#"')
    if unkept:
        raise refusal(
            f"{', '.join(sorted(unkept))} of a function's parameters cannot be kept to "
            "where a model writes arguments one by one. Leave it out, or put it into the schema of an argument.",
            param="tools",
        )


def _refers_to_the_whole(value: Any) -> bool:
    """Whether an argument may be all arguments, which are no JSON here."""
    if isinstance(value, Mapping):
        return value.get("$ref") == "#" or any(map(_refers_to_the_whole, value.values()))
    return isinstance(value, list) and any(map(_refers_to_the_whole, value))


def _is_at_most(number: Any, limit: Any) -> bool:
    return type(number) in (int, float) and type(limit) in (int, float) and number <= limit
