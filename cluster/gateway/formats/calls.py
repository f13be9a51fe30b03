"""Steps that the parsers of several families share."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

from cluster.gateway.formats.base import Arguments, CallBroken, CallEnd, CallStart, Event, Steps, Text
from cluster.gateway.formats.source import Source, Wait

R = TypeVar("R")
Attempt = Generator[Event | None, None, bool]
"""Steps that read one call. They return whether it is whole; if it is not, they may stop anywhere."""

_NAME_KEYS = ('"name"', '"function"')
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')
_OTHER_KEYS = ('"id"', '"type"')


def plain_text(source: Source) -> Steps:
    """All of the output as content."""
    yield from source.until((), Text, trims=False)


def marked_calls(source: Source, openers: Sequence[str], read: Callable[[str], Attempt]) -> Steps:
    """Content with calls that begin with one of ``openers``. ``read(opener)`` reads a call, its opener included."""
    while (opener := (yield from source.until(openers, Text))) is not None:
        if (yield from attempt(source, _after_space(source, read(opener)))):
            yield from source.skip_space()
            yield from source.skip_cut(*openers)


def _after_space(source: Source, steps: Attempt) -> Attempt:
    yield from source.skip_space()
    return (yield from steps)


def skip_openers(source: Source, opener: str, section: str, call: str) -> Wait[bool]:
    """Reads ``opener``, and behind the mark of a section that of its first call. Returns whether a call begins."""
    yield from source.skip(opener)
    if opener != section:
        return True
    yield from source.skip_space()
    return (yield from source.skip(call))


def skip_closers(source: Source, *closers: str) -> Wait[None]:
    """Reads the marks behind a call, of which any may be missing, or cut off by the end of the output."""
    for closer in closers:
        yield from source.skip_space()
        yield from source.skip(closer)
        yield from source.skip_cut(closer)


def attempt(source: Source, steps: Attempt) -> Attempt:
    """Runs ``steps`` over what may be a call. If it is none, all that they read becomes content, and is not read again,
    so that the work for an output grows with its length only."""
    source.mark()
    is_open = False
    while True:
        try:
            event = next(steps)
        except StopIteration as stop:
            is_whole = bool(stop.value)
            break
        is_open = isinstance(event, CallStart) or (is_open and not isinstance(event, CallEnd))
        yield event
    text = source.since_mark()
    if not is_whole and text:
        yield CallBroken(text) if is_open else Text(text)
    return is_whole


def whole_calls(steps: Steps) -> Steps:
    """``steps`` with the events of each call together when it is complete. A call that breaks is text."""
    held: list[Event] = []
    for event in steps:
        if isinstance(event, CallBroken):
            held.clear()
            yield Text(event.source)
        elif event is None or not (held or isinstance(event, CallStart)):
            yield event
        else:
            held.append(event)
            if isinstance(event, CallEnd):
                yield from held
                held.clear()


def call_list(source: Source, first: Attempt, further: Callable[[], Attempt], *marks: str) -> Steps:
    """Reads calls between commas and a closing bracket, of which ``first`` has read the opening one.

    Args:
        marks: what may follow; if the output ends within one of them, its beginning is dropped.
    """
    is_whole = yield from attempt(source, _after_space(source, first))
    while is_whole:
        yield from source.skip_space()
        if not (yield from source.skip(",")):
            yield from source.skip("]")
            yield from source.skip_space()
            yield from source.skip_cut(*marks)
            return
        is_whole = yield from attempt(source, _after_space(source, further()))


def arguments(source: Source, name: str) -> Attempt:
    """Reads a JSON object as the arguments of ``name``."""
    if (yield from source.at_end()) or not source.unread.startswith("{"):
        return False
    yield CallStart(name)
    return (yield from source.json_value(Arguments))


def object_call(source: Source, names: Collection[str] | None = None) -> Attempt:
    """Reads a call written as a JSON object with ``name`` and ``arguments`` (or ``parameters``), in any order.

    The closing brace may be missing at the end of the output.

    Args:
        names: only these functions, and with arguments; ``None`` allows all.
    """
    if not (yield from source.skip("{")):
        return False
    name, is_started = "", False
    early = "{}" if names is None else None
    while True:
        yield from source.skip_space()
        key = yield from json_text(source)
        yield from source.skip_space()
        if key not in _NAME_KEYS + _ARGUMENT_KEYS + _OTHER_KEYS or not (yield from source.skip(":")):
            return False
        yield from source.skip_space()
        if key in _NAME_KEYS:
            name = _string((yield from json_text(source)))
            if not name or (names is not None and name not in names):
                return False
        elif key in _ARGUMENT_KEYS and name and not is_started and source.unread.startswith("{"):
            is_started = True
            if not (yield from arguments(source, name)):
                return False
        elif (value := (yield from json_text(source))) is None:
            return False
        elif key in _ARGUMENT_KEYS:
            early = _object_of(value)
        yield from source.skip_space()
        if not (yield from source.skip(",")):
            break
    if not (yield from source.skip("}")) and not (is_started and (yield from source.at_end())):
        return False
    if not is_started:
        if not name or early is None:
            return False
        yield CallStart(name)
        yield Arguments(early)
    yield CallEnd()
    return True


def json_text(source: Source) -> Wait[str | None]:
    """Reads one JSON value; ``None`` if it is not valid."""
    if (yield from source.at_end()):
        return None
    if source.unread[0] not in '{["':
        scalar = yield from source.take_while(lambda char: char.isalnum() or char in "+-.")
        return scalar if scalar in ("true", "false", "null") or scalar[-1:].isdigit() else None
    text, is_valid = yield from gathered(source.json_value(str))
    return text if is_valid else None


def gathered(steps: Generator[str | None, None, R]) -> Wait[tuple[str, R]]:
    """All pieces that ``steps`` yields, and what they return."""
    pieces: list[str] = []
    while True:
        try:
            piece = next(steps)
        except StopIteration as stop:
            return "".join(pieces), stop.value
        if piece is None:
            yield None
        else:
            pieces.append(piece)


def _string(value: str | None) -> str:
    found = json.loads(value) if value is not None and value.startswith('"') else ""
    return str(found)


def _object_of(value: str) -> str | None:
    """The JSON object that ``value`` is, or that it holds as a string; null is an empty one."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        value = json.loads(value)
        try:
            return value if isinstance(json.loads(value), dict) else None
        except (ValueError, RecursionError):
            return None
    return value if value.startswith("{") else None
