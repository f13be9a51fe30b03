"""Calls whose arguments stand one by one between tags, as text or as JSON: Qwen3-Coder, GLM, MiniMax."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.gateway.formats.base import Arguments, CallEnd, CallRule, CallStart, Event, Function, Steps, TokenRefs
from cluster.gateway.formats.calls import Attempt, gathered, marked_calls, skip_closers, skip_openers
from cluster.gateway.formats.grammar import (
    alternatives,
    calls_rule,
    json_rule,
    literal,
    many,
    up_to,
    up_to_rules,
)
from cluster.gateway.formats.keyword_arguments import keyword_rules, properties_of, types_of
from cluster.gateway.formats.source import Source, Wait

_NAME = re.compile(r"[^\s{}\[\]]+")


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """The tags of one family, in the order in which they are written. Those that a family does not have are empty.

    Attributes:
        markers: the tags that are tokens of their own in the family's tokenizers.
        calls, calls_end: around a call, or around all calls.
        holds_all: whether ``calls`` and ``calls_end`` are around all calls.
        function, name_end, function_end: before and behind a name, and behind a call's arguments.
        key, key_end, value, value_end: around a key and its value.
        gap: white space between tags.
        value_gap: white space between a value and its tags.
    """

    name: str
    markers: tuple[str, ...]
    calls: str
    calls_end: str = ""
    holds_all: bool = False
    function: str = ""
    name_end: str = ""
    function_end: str
    key: str
    key_end: str
    value: str = ""
    value_end: str
    gap: str = "\n"
    value_gap: str = ""

    @property
    def example(self) -> str:
        key = f"{self.key}key{self.key_end}{self.gap if self.value else ''}{self.value}"
        argument = f"{key}{self.value_gap}value{self.value_gap}{self.value_end}"
        call = f"{self.function}name{self.name_end}{self.gap}{argument}{self.gap}{self.function_end}"
        return f"{self.calls}{self._outer_gap}{call}{self._outer_gap}{self.calls_end}"

    @property
    def _outer_gap(self) -> str:
        return self.gap if self.function else ""

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        schemas = {function.name: properties_of(function.parameters) for function in functions}
        return marked_calls(source, [*filter(None, (self.calls, self.function))], partial(self._read, source, schemas))

    def _read(self, source: Source, schemas: Mapping[str, Mapping[str, Any]], opener: str) -> Attempt:
        if not (yield from skip_openers(source, opener, self.calls, self.function)):
            return False
        name = yield from _word(source, self.name_end)
        if not _NAME.fullmatch(name):
            return False
        yield CallStart(name)
        yield from source.skip_space()
        num_keys = 0
        while (yield from source.skip(self.key)):
            key = yield from _word(source, self.key_end)
            if not key:
                return False
            yield Arguments(("{" if num_keys == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            if not (yield from self._read_value(source, types_of(schemas.get(name, {}).get(key)))):
                return False
            num_keys += 1
            yield from source.skip_space()
        if not (yield from source.skip(self.function_end)) and not (yield from self._leaves_end_out(source)):
            return False
        yield Arguments("}" if num_keys else "{}")
        yield CallEnd()
        yield from skip_closers(source, self.calls_end)
        return True

    def _leaves_end_out(self, source: Source) -> Wait[bool]:
        """Whether the output ends here, and nothing but the tag behind the arguments is missing or cut off."""
        if not self.key.startswith(source.unread) and (yield from source.skip_cut(self.function_end)):
            return True
        is_at_end = yield from source.at_end()
        return is_at_end and (source.cut_by is None or source.cut_by.startswith(self.function_end))

    def _read_value(self, source: Source, types: Sequence[str]) -> Generator[Event | None, None, bool]:
        """Reads a value and the tag behind it. Strings are passed on as they arrive."""
        if self.value:
            yield from source.skip_space()
        if not (yield from source.skip(self.value)):
            return False
        yield from source.skip(self.value_gap)
        ends = (self.value_gap + self.value_end, self.value_end)
        if list(types) == ["string"]:
            yield Arguments('"')
            end = yield from source.until(ends, lambda text: Arguments(_escaped(text)), trims=False)
            yield Arguments('"')
        else:
            text, end = yield from gathered(source.until(ends, str, trims=False))
            yield Arguments(_converted(text, types))
        return end is not None and (yield from source.skip(end))

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        gap, outer_gap, end = literal(self.gap), literal(self._outer_gap), token(self.calls_end)
        if self.holds_all:
            rest = f"{outer_gap} {many(rule, 'body', f'{gap} body')} {outer_gap} {end}"
        else:
            call = f"{outer_gap} body {outer_gap} {end}"
            rest = many(rule, call, f"{gap} {token(self.calls)} {call}")
        bodies, arguments = [], []
        for index, function in enumerate(rule.functions):
            head = literal(self.function + function.name + self.name_end)
            bodies.append(f"{head} {gap} arguments_{index} {token(self.function_end)}")
            arguments.append(
                keyword_rules(
                    f"arguments_{index}", rule.schema_of(function), partial(self._argument, token), "any_argument", ""
                )
            )
        tail = self.value_gap + self.value_end
        return "".join(
            [
                calls_rule(rule, token, self.calls, rest),
                alternatives("body", bodies),
                *arguments,
                f'any_argument: {token(self.key)} NAME {self._behind_key(token)} string_value\nNAME: /[^<>"\\n]+/\n',
                f"string_value: {up_to('value', token, tail)} {gap}\n",
                up_to_rules("value", tail),
            ]
        )

    def _argument(self, token: TokenRefs, key: str, schema: Mapping[str, Any]) -> str:
        types = types_of(schema)
        head = f"{token(self.key)} {literal(key)} {self._behind_key(token)}"
        if types and "string" not in types:
            value = json_rule(schema)
        elif "enum" in schema:
            value = f"({' | '.join(literal(str(option)) for option in schema['enum'])})"
        else:
            return f"{head} string_value"
        return f"{head} {value} {literal(self.value_gap)} {token(self.value_end)} {literal(self.gap)}"

    def _behind_key(self, token: TokenRefs) -> str:
        value = f"{literal(self.gap)} {token(self.value)} " if self.value else ""
        return f"{token(self.key_end)} {value}{literal(self.value_gap)}"


def _word(source: Source, end: str) -> Wait[str]:
    """Reads a name up to ``end``; empty if there is none."""
    word = yield from source.take_while(lambda char: char not in '<>"\n')
    return word.strip() if (yield from source.skip(end)) else ""


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
