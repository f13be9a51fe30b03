"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, and models without an own form."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.gateway.formats.base import CallRule, Function, Steps, TokenRefs
from cluster.gateway.formats.calls import Attempt, marked_calls, object_call, skip_closers
from cluster.gateway.formats.grammar import calls_rule, many, object_call_rules
from cluster.gateway.formats.source import Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    name = "hermes"
    markers = (OPEN, CLOSE)
    example = f'{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        def read(opener: str) -> Attempt:
            yield from source.skip(opener)
            yield from source.skip_space()
            is_whole = yield from object_call(source)
            yield from skip_closers(source, CLOSE)
            return is_whole

        return marked_calls(source, (OPEN,), read)

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        rest = f'"\\n" body "\\n" {token(CLOSE)}'
        calls = calls_rule(rule, token, OPEN, many(rule, rest, f'"\\n" {token(OPEN)} {rest}'))
        return calls + object_call_rules(rule, "arguments")
