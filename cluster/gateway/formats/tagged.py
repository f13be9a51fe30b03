"""Calls whose arguments stand one by one between tags, as text or as JSON: Qwen3-Coder, GLM, MiniMax."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from baton.grammar.schema_walk import Schema
from cluster.gateway.formats.base import Arguments, CallEnd, CallRule, CallStart, Event, Function, Steps, TokenRefs
from cluster.gateway.formats.calls import Attempt, gathered, marked_calls, skip_closers, skip_openers
from cluster.gateway.formats.grammar import (
    alternatives,
    calls_rule,
    literal,
    many,
)
from cluster.gateway.formats.keyword_arguments import keyword_rules, properties_of, unkept_key
from cluster.gateway.formats.schema_branches import alternatives_of
from cluster.gateway.formats.source import Source, Wait
from cluster.gateway.formats.tagged_values import converted, holds_json, string_value_rules, value_rules

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

    def _read(self, source: Source, schemas: Mapping[str, Mapping[str, Schema]], opener: str) -> Attempt:
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
            types = alternatives_of(schemas.get(name, {}).get(key, {})).types
            if not (yield from self._read_value(source, types)):
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
            value = ""
            if holds_json(types) and not (yield from source.at_end()) and source.unread[0] in "[{":
                value, _ = yield from gathered(source.json_value(str))
            text, end = yield from gathered(source.until(ends, str, trims=False))
            yield Arguments(converted(value + text, types))
        return end is not None and (yield from source.skip(end))

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        gap, outer_gap, end = literal(self.gap), literal(self._outer_gap), token(self.calls_end)
        if self.holds_all:
            rest = f"{outer_gap} {many(rule, 'body', f'{gap} body')} {outer_gap} {end}"
        else:
            call = f"{outer_gap} body {outer_gap} {end}"
            rest = many(rule, call, f"{gap} {token(self.calls)} {call}")
        heads = [literal(self.function + function.name + self.name_end) for function in rule.functions]
        bodies = [f"{head} {gap} arguments_{i} {token(self.function_end)}" for i, head in enumerate(heads)]
        return "".join(
            [
                calls_rule(rule, token, self.calls, rest),
                alternatives("body", bodies),
                keyword_rules(rule, partial(self._argument, token), "any_argument", ""),
                f"any_argument: {token(self.key)} NAME {self._behind_key(token)} string_value {gap}\n",
                'NAME: /[^<>"\\n]+/\n',
                string_value_rules(token, self.value_gap, self.value_end),
            ]
        )

    def _argument(self, token: TokenRefs, name: str, key: str, schema: Schema) -> tuple[str, str]:
        if not key or not all(map(_is_of_word, key)) or key != key.strip():
            raise unkept_key(key)
        value, rules = value_rules(name, schema, token, self.value_gap, self.value_end)
        return f"{token(self.key)} {literal(key)} {self._behind_key(token)} {value} {literal(self.gap)}", rules

    def _behind_key(self, token: TokenRefs) -> str:
        value = f"{literal(self.gap)} {token(self.value)} " if self.value else ""
        return f"{token(self.key_end)} {value}{literal(self.value_gap)}"


def _is_of_word(char: str) -> bool:
    return char not in '<>"\n'


def _word(source: Source, end: str) -> Wait[str]:
    """Reads a name up to ``end``; empty if there is none."""
    word = yield from source.take_while(_is_of_word)
    return word.strip() if (yield from source.skip(end)) else ""


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
