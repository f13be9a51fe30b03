"""``[TOOL_CALLS]`` with a JSON list of calls, or with ``name[ARGS]{…}`` for each call: Mistral."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.gateway.formats.base import CallEnd, CallRule, Function, Steps, Text, TokenRefs
from cluster.gateway.formats.calls import Attempt, arguments, call_list, object_call
from cluster.gateway.formats.grammar import (
    alternatives,
    argument_rules,
    calls_rule,
    listed,
    literal,
    many,
    object_call_rules,
)
from cluster.gateway.formats.source import Source

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral:
    """The parser knows both forms. Grammars have the one of the model's template."""

    markers = (CALLS, ARGS, CALL_ID)

    def __init__(self, name: str, *, is_list: bool) -> None:
        self.name = name
        self._is_list = is_list

    @property
    def example(self) -> str:
        call = '[{"name": <function-name>, "arguments": <args-json-object>}]'
        return CALLS + (call if self._is_list else f"<function-name>{ARGS}<args-json-object>")

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        while (yield from source.until((CALLS,), Text)) is not None:
            yield from call_list(source, _read(source), lambda: object_call(source), CALLS)

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        if self._is_list:
            rest = listed(rule, "body")
            return calls_rule(rule, token, CALLS, rest) + object_call_rules(rule, "arguments")
        calls = calls_rule(rule, token, CALLS, many(rule, "body", f"{token(CALLS)} body"))
        bodies = [
            f"{literal(function.name)} {token(ARGS)} arguments_{index}" for index, function in enumerate(rule.functions)
        ]
        return calls + alternatives("body", bodies) + argument_rules(rule)


def _read(source: Source) -> Attempt:
    yield from source.skip(CALLS)
    yield from source.skip_space()
    if not (yield from source.skip("[")):
        return (yield from _read_named(source))
    yield from source.skip_space()
    return (yield from object_call(source))


def _read_named(source: Source) -> Attempt:
    name = yield from source.take_while(lambda char: char not in "[{")
    if (yield from source.skip(CALL_ID)):
        yield from source.take_while(lambda char: char not in "[{")
    yield from source.skip(ARGS)
    is_whole = bool(name.strip()) and (yield from arguments(source, name.strip()))
    if is_whole:
        yield CallEnd()
    return is_whole
