"""``<｜tool▁calls▁begin｜>`` and its companions: DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.gateway.formats.base import CallEnd, CallRule, Function, Steps, TokenRefs
from cluster.gateway.formats.calls import Attempt, arguments, gathered, marked_calls, skip_closers, skip_openers
from cluster.gateway.formats.grammar import alternatives, argument_rules, calls_rule, literal, many
from cluster.gateway.formats.source import Source

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeek:
    """V3 and R1 write ``function``, the name and a fenced block; V3.1 writes the name and the arguments.

    The parser knows both forms. Grammars have the one of the model's template.
    """

    markers = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)

    def __init__(self, name: str, *, is_fenced: bool) -> None:
        self.name = name
        self._is_fenced = is_fenced

    @property
    def example(self) -> str:
        plain = f"<function-name>{SEPARATOR}<args-json-object>"
        fenced = f"function{SEPARATOR}<function-name>\n```json\n<args-json-object>\n```"
        return f"{CALLS}{CALL}{fenced if self._is_fenced else plain}{CALL_END}{CALLS_END}"

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        return marked_calls(source, (CALLS, CALL), lambda opener: _read(source, opener))

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        call = f"{token(CALL)} body {token(CALL_END)}"
        between = '"\\n" ' if self._is_fenced else ""
        rest = f"{many(rule, call, between + call)} {token(CALLS_END)}"
        bodies = [self._body(function.name, index, token) for index, function in enumerate(rule.functions)]
        return calls_rule(rule, token, CALLS, rest) + alternatives("body", bodies) + argument_rules(rule)

    def _body(self, name: str, index: int, token: TokenRefs) -> str:
        if not self._is_fenced:
            return f"{literal(name)} {token(SEPARATOR)} arguments_{index}"
        head, end = literal(name + "\n```json\n"), literal("\n```")
        return f'"function" {token(SEPARATOR)} {head} arguments_{index} {end}'


def _read(source: Source, opener: str) -> Attempt:
    if not (yield from skip_openers(source, opener, CALLS, CALL)):
        return False
    kind, found = yield from gathered(source.until((SEPARATOR,), str))
    if found is None:
        return False
    yield from source.skip_space()
    yield from source.skip(SEPARATOR)
    name = kind.strip()
    if name == "function":
        name = (yield from source.take_while(lambda char: char != "\n")).strip()
        yield from source.skip_space()
        yield from source.skip("```json")
    yield from source.skip_space()
    if not name or not (yield from arguments(source, name)):
        return False
    yield CallEnd()
    yield from skip_closers(source, "```", CALL_END, CALLS_END)
    return True
