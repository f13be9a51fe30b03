"""What every family of output formats provides, and the events that a parsed output consists of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from baton.core.errors import InvalidRequestError
from cluster.gateway.formats.source import Source

_HALF = re.compile(
    rb"\\u[dD][89aAbB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89aAbB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


@dataclass(frozen=True, slots=True)
class Text:
    """Content of the message."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning that precedes the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Its arguments follow, then :class:`CallEnd` or :class:`CallBroken`."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the call that began last, which is JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call that began last has no valid end.

    Attributes:
        source: what the model wrote from the beginning of the call on, for the content of a whole response.
    """

    source: str


Event = Text | Reasoning | CallStart | Arguments | CallEnd | CallBroken
Steps = Iterator[Event | None]
"""What a parser yields: events, and ``None`` when it needs more text."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object.
        strict: its arguments must follow the schema, whether or not a call is required.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def refused(self, error: InvalidRequestError) -> InvalidRequestError:
        """``error`` of the parameters, with the name of the function."""
        return InvalidRequestError(f"The parameters of the function {self.name!r}: {error.message}", param="tools")


@dataclass(frozen=True, slots=True)
class CallRule:
    """What a grammar of calls must allow.

    Attributes:
        functions: those that may be called.
        is_required: the output must have a call; otherwise it may be text.
        is_single: not more than one call.
        constrains: whether the arguments of a function follow its schema; those of others are any JSON object.
        answer: the rule of an answer without a call; empty if it is any text.
    """

    functions: Sequence[Function]
    is_required: bool
    is_single: bool
    constrains: Callable[[Function], bool] = lambda _: True
    answer: str = ""

    def schema_of(self, function: Function) -> Mapping[str, Any]:
        return function.parameters if self.constrains(function) else {"type": "object"}


def as_json(value: Any, *, allow_nan: bool = True) -> str:
    """``value`` as JSON that can be encoded as UTF-8: a lone surrogate stays an escape.

    Raises:
        ValueError: it holds NaN or an infinite number, and ``allow_nan`` is false.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def whole_characters(text: bytes) -> bytes:
    """JSON in which U+FFFD stands for each half of a character, the escape of a surrogate without its other one."""
    if b"\0" in text:
        return text  # it is no JSON
    # While NUL stands for an escaped backslash, every other backslash begins an escape.
    return _HALF.sub(rb"\\ufffd", text.replace(rb"\\", b"\0")).replace(b"\0", rb"\\")


def read_json(text: str) -> Any:
    """The value of JSON, in which integers, of any number of digits, are only known as such.

    Raises:
        ValueError: ``text`` is not JSON; NaN and infinity are not either.
    """
    return json.loads(text, parse_int=len, parse_constant=_refuse)  # Python reads at most 4,300 digits


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class TokenRefs(Protocol):
    def __call__(self, text: str) -> str:
        """How a grammar names a mark: ``<[id]>`` if it is a special token, a string if it is none, and in parentheses
        both if it is an added token that may be taken for either."""
        ...


class ToolFormat(Protocol):
    """How a family of models writes tool calls."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see even if they are special tokens."""
        ...

    @property
    def example(self) -> str:
        """A call as the model must write it, for templates that do not say so."""
        ...

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        """Parses the output after the reasoning. Decisions depend on the text alone, not on how it arrives."""
        ...

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        """Rules in llguidance's Lark dialect, of which ``calls`` is the first: everything after the reasoning."""
        ...


@dataclass
class OutputParser:
    """Drives the steps of a parser with pieces of text."""

    source: Source
    steps: Steps
    is_single: bool = False
    """The output ends with its first call."""
    is_complete: bool = field(default=False, init=False)
    """Whether nothing may follow."""
    num_reasoning_tokens: int = field(default=0, init=False)
    _ends_with_call: bool = field(default=False, init=False)

    def push_token(self, text: str) -> list[Event]:
        """Like :meth:`push`, for the text of one token, which counts as reasoning if any of it is."""
        was_reasoning = self.source.in_reasoning
        events = self.push(text)
        self.num_reasoning_tokens += was_reasoning or self.source.in_reasoning
        return events

    def push(self, text: str) -> list[Event]:
        """Events that ``text`` completes; none once the output is complete."""
        if self.is_complete:
            return []
        self.source.feed(text)
        return self._advance()

    def finish(self, cut_by: str | None = None, shown: str = "") -> list[Event]:
        """The last events.

        Args:
            cut_by: see :meth:`Source.end`.
            shown: the stop string or the text of the stop token, if it is part of the output. It completes no call.
        """
        may_be_call = bool(self.source.unread) or self.source.is_marked
        is_read = self.source.in_reasoning or not may_be_call
        if is_read:
            self.source.feed(shown)
        self.source.end(cut_by)
        events = self.push("")
        if is_read and shown and any(isinstance(event, CallEnd) for event in events):
            return [Text(shown)]
        if not is_read and shown and not self._ends_with_call:
            events.append(Text(shown))
        return events

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        for event in self.steps:
            if event is None:
                break
            events.append(event)
            self._ends_with_call = isinstance(event, CallEnd)
            if self.is_single and isinstance(event, CallEnd):
                self.is_complete = True
                break
        return events
