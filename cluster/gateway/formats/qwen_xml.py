"""``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``: Qwen3-Coder."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

from cluster.gateway.formats.base import Arguments, CallEnd, CallRule, CallStart, Event, Function, Steps, TokenRefs
from cluster.gateway.formats.calls import Attempt, gathered, marked_calls
from cluster.gateway.formats.grammar import alternatives, calls_rule, json_rule, literal, many
from cluster.gateway.formats.keyword_arguments import keyword_rules, properties_of, types_of
from cluster.gateway.formats.source import Source, Wait

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_RULES = r"""any_parameter: "<parameter=" NAME ">\n" string_value
NAME: /[^<>\n]+/
string_value[lazy]: /(.|\n)*\n<\/parameter>\n/
"""
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END)


class QwenXml:
    name = "qwen_xml"
    markers = (OPEN, CLOSE)
    example = f"{OPEN}\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n{CLOSE}"

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        schemas = {function.name: properties_of(function.parameters) for function in functions}
        return marked_calls(source, (OPEN, FUNCTION), partial(_read, source, schemas))

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        rest = f'"\\n" body "\\n" {token(CLOSE)}'
        bodies = [
            f'{literal(f"{FUNCTION}{function.name}>")} "\\n" arguments_{index} {literal(FUNCTION_END)}'
            for index, function in enumerate(rule.functions)
        ]
        arguments = [
            keyword_rules(f"arguments_{index}", rule.schema_of(function), _parameter_rule, "any_parameter", "")
            for index, function in enumerate(rule.functions)
        ]
        calls = calls_rule(rule, token, OPEN, many(rule, rest, f'"\\n" {token(OPEN)} {rest}'))
        return calls + alternatives("body", bodies) + "".join(arguments) + _VALUE_RULES


def _parameter_rule(key: str, schema: Mapping[str, Any]) -> str:
    head = literal(f"{PARAMETER}{key}>\n")
    if _is_text(schema) and "enum" not in schema:
        return f"{head} string_value"
    end = literal(f"\n{PARAMETER_END}\n")
    if _is_text(schema):
        return f"{head} ({' | '.join(literal(str(option)) for option in schema['enum'])}) {end}"
    return f"{head} {json_rule(schema)} {end}"


def _is_text(schema: Mapping[str, Any] | None) -> bool:
    types = types_of(schema)
    return not types or "string" in types


def _read(source: Source, schemas: Mapping[str, Mapping[str, Any]], opener: str) -> Attempt:
    yield from source.skip(opener)
    if opener == OPEN:
        yield from source.skip_space()
        if not (yield from source.skip(FUNCTION)):
            return False
    name = yield from _name(source)
    if not name:
        return False
    yield CallStart(name)
    yield from source.skip_space()
    num_keys = 0
    while (yield from source.skip(PARAMETER)):
        key = yield from _name(source)
        if not key:
            return False
        yield Arguments(("{" if num_keys == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        if not (yield from _value(source, schemas.get(name, {}).get(key))):
            return False
        num_keys += 1
        yield from source.skip_space()
    if not (yield from source.skip(FUNCTION_END)) and not (yield from source.at_end()):
        return False
    yield Arguments("}" if num_keys else "{}")
    yield CallEnd()
    yield from source.skip_space()
    yield from source.skip(CLOSE)
    return True


def _name(source: Source) -> Wait[str]:
    """Reads ``NAME>``; empty if there is none."""
    name = yield from source.take_while(lambda char: char not in "<>\n")
    return name.strip() if (yield from source.skip(">")) else ""


def _value(source: Source, schema: Mapping[str, Any] | None) -> Generator[Event | None, None, bool]:
    """Reads a value up to the end of its parameter. Strings are passed on as they arrive."""
    yield from source.skip("\n")
    if types_of(schema) == ["string"]:
        yield Arguments('"')
        end = yield from source.until(_VALUE_ENDS, lambda text: Arguments(_escaped(text)), trims=False)
        yield Arguments('"')
    else:
        text, end = yield from gathered(source.until(_VALUE_ENDS, str, trims=False))
        yield Arguments(_converted(text, types_of(schema)))
    return end is not None and (yield from source.skip(end))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _converted(text: str, types: Sequence[str]) -> str:
    """``text`` as JSON: a value of one of the types if it is one, otherwise a string."""
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        value = text
    kinds = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
    kind = kinds.get(type(value), "string")
    is_allowed = kind in types or (kind == "integer" and "number" in types) or (not types and kind != "string")
    return json.dumps(value if is_allowed else text, ensure_ascii=False)
