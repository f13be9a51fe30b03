"""``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``: Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster.gateway.formats.base import CallEnd, CallRule, Function, Steps, TokenRefs
from cluster.gateway.formats.calls import Attempt, arguments, gathered, marked_calls, skip_closers, skip_openers
from cluster.gateway.formats.grammar import alternatives, argument_rules, calls_rule, literal, many
from cluster.gateway.formats.source import Source

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


class Kimi:
    name = "kimi"
    markers = (CALLS, CALLS_END, CALL, ARGUMENTS, CALL_END)
    example = f"{CALLS}{CALL}functions.name:0{ARGUMENTS}<args-json-object>{CALL_END}{CALLS_END}"

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        return marked_calls(source, (CALLS, CALL), lambda opener: _read(source, opener))

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        call = f"{token(CALL)} body {token(CALL_END)}"
        rest = f"{many(rule, call, call)} {token(CALLS_END)}"
        bodies = [
            f"{literal(f'functions.{function.name}:')} INDEX {token(ARGUMENTS)} arguments_{index}"
            for index, function in enumerate(rule.functions)
        ]
        calls = calls_rule(rule, token, CALLS, rest) + alternatives("body", bodies)
        return calls + "INDEX: /[0-9]{1,4}/\n" + argument_rules(rule)


def _read(source: Source, opener: str) -> Attempt:
    if not (yield from skip_openers(source, opener, CALLS, CALL)):
        return False
    call_id, found = yield from gathered(source.until((ARGUMENTS,), str))
    name = _ID.fullmatch(call_id.strip())
    if found is None or name is None:
        return False
    yield from source.skip_space()
    yield from source.skip(ARGUMENTS)
    yield from source.skip_space()
    if not (yield from arguments(source, name[1])):
        return False
    yield CallEnd()
    yield from skip_closers(source, CALL_END, CALLS_END)
    return True
