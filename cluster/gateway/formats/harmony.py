"""Channels: ``<|channel|>analysis<|message|>…``. gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from cluster.gateway.formats.base import (
    CallEnd,
    CallRule,
    Event,
    Function,
    Reasoning,
    Steps,
    Text,
    TokenRefs,
)
from cluster.gateway.formats.calls import Attempt, arguments, attempt, gathered
from cluster.gateway.formats.grammar import ANY_TEXT, alternatives, argument_rules, literal
from cluster.gateway.formats.source import Source

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL, RETURN, START)
_ANALYSIS = "analysis"
_RECIPIENT = "to=functions."
_FUNCTION = re.compile(r"functions\.([\w.-]+)")


class Harmony:
    """Messages to a function are calls, the channel ``analysis`` is reasoning, and all else is content."""

    name = "harmony"
    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    example = f"{CHANNEL}commentary {_RECIPIENT}name {CONSTRAIN}json{MESSAGE}<args-json-object>{CALL}"

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        names = {function.name for function in functions}
        earlier: set[bool] = set()
        while not (yield from source.at_end()):
            if not (yield from attempt(source, _read_message(source, names, earlier))):
                yield from source.until(_ENDS, Text, trims=False)
            for end in _ENDS[:-1]:
                yield from source.skip(end)

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        head = f'{token(START)} "assistant" '
        analysis = f'{token(CHANNEL)} "analysis" {token(MESSAGE)} text {token(END)} {head}'
        final = f'{token(CHANNEL)} "final" {token(MESSAGE)} {rule.answer or "text"}'
        text = f"text: {ANY_TEXT}\n"
        if not rule.functions:
            return f"calls: ({analysis})? {final}\n{text}"
        bodies = [
            f'{literal(f"{_RECIPIENT}{function.name} ")} {token(CONSTRAIN)} "json" {token(MESSAGE)} arguments_{index}'
            for index, function in enumerate(rule.functions)
        ]
        call = f'{token(CHANNEL)} "commentary " body'
        calls = f"calls: ({analysis})? ({call if rule.is_required else f'{call} | {final}'})\n{text}"
        return calls + alternatives("body", bodies) + argument_rules(rule)


def _read_message(source: Source, names: Collection[str], earlier: set[bool]) -> Attempt:
    """Reads a header and its message. The generation prompt ends before the channel of the first header.

    Args:
        earlier: whether there were messages with reasoning, and others; texts of one kind are kept apart.
    """
    for opener in (START, CHANNEL, " to="):
        if (yield from source.skip(opener)):
            break
    else:
        return False
    header, found = yield from gathered(source.until((MESSAGE, *_ENDS), str, trims=False))
    if found != MESSAGE:
        return False
    yield from source.skip(MESSAGE)
    recipient = _FUNCTION.search(header)
    if recipient is not None:
        yield from source.skip_space()
        if recipient[1] not in names or not (yield from arguments(source, recipient[1])):
            return False
        yield CallEnd()
        yield from source.skip_space()
        yield from source.skip_cut(*_ENDS)
        return True
    source.since_mark()
    is_reasoning = _ANALYSIS in header
    make: Callable[[str], Event] = Reasoning if is_reasoning else Text
    if is_reasoning in earlier:
        yield make("\n\n")
    earlier.add(is_reasoning)
    source.in_reasoning = is_reasoning
    yield from source.until(_ENDS, make, trims=is_reasoning)
    if is_reasoning:
        yield from source.skip_space()
    source.in_reasoning = False
    return True
