"""``[name(key=value, …), …]``, with or without ``<|python_start|>``: Llama 3.2 and 4."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from baton.grammar.schema_walk import Schema
from cluster.gateway.formats.base import (
    Arguments,
    CallEnd,
    CallRule,
    CallStart,
    Function,
    Steps,
    Text,
    TokenRefs,
    as_json,
    read_json,
)
from cluster.gateway.formats.calls import Attempt, call_list
from cluster.gateway.formats.grammar import alternatives, json_rule, listed, literal, unmarked_rule
from cluster.gateway.formats.keyword_arguments import keyword_rules, unkept_key
from cluster.gateway.formats.source import Source, Wait

START, END = "<|python_start|>", "<|python_end|>"
_KEY = re.compile(r"([^\s=,'\"()\[\]{}]+)\s*=\s*")
_SPACE = re.compile(r"\s*")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None}


class Pythonic:
    """Calls have no mark of their own, so that only lists which begin with a known function count."""

    name = "pythonic"
    markers = (START, END)
    example = "[function_name(key=value)]"

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        names = {function.name for function in functions}
        while (opener := (yield from source.until((START, "["), Text))) is not None:
            yield from call_list(source, _read_first(source, opener, names), lambda: _read(source, names), START, END)
            if (yield from source.skip(END)):
                yield from source.skip_space()

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        bodies = [
            f'{literal(f"{function.name}(")} arguments_{index} ")"' for index, function in enumerate(rule.functions)
        ]
        arguments = keyword_rules(rule, _keyword_rule, "any_keyword", ", ")
        calls = listed(rule, "body")
        keyword = f'any_keyword: NAME "=" any_value\nNAME: /[A-Za-z_][A-Za-z0-9_]*/\nany_value: {json_rule({})}\n'
        return unmarked_rule(rule, calls, r"\[") + keyword + alternatives("body", bodies) + arguments


def _keyword_rule(name: str, key: str, schema: Schema) -> tuple[str, str]:
    if not _KEY.fullmatch(f"{key}="):
        raise unkept_key(key)
    return f"{literal(f'{key}=')} {json_rule(schema)}", ""


def _read_first(source: Source, opener: str, names: Collection[str]) -> Attempt:
    if opener == START:
        yield from source.skip(START)
        yield from source.skip_space()
    if not (yield from source.skip("[")):
        return False
    yield from source.skip_space()
    return (yield from _read(source, names))


def _read(source: Source, names: Collection[str]) -> Attempt:
    """Reads one call. Its arguments are known when it ends."""
    name = yield from source.take_while(lambda char: char.isalnum() or char in "_.-")
    if name not in names or not (yield from source.skip("(")):
        return False
    arguments = _parsed((yield from _parenthesised(source)))
    if arguments is None:
        return False
    yield CallStart(name)
    yield Arguments(arguments)
    yield CallEnd()
    return True


def _parenthesised(source: Source) -> Wait[str | None]:
    """Reads up to the closing parenthesis, which is left out."""
    scan = _PythonScan()
    text = yield from source.take_while(scan.accepts)
    return text if (yield from source.skip(")")) else None


class _PythonScan:
    """Follows strings and brackets."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._quote = ""
        self._is_escaped = False

    @property
    def is_inside(self) -> bool:
        """Whether a string or bracket is open."""
        return bool(self._open or self._quote)

    def accepts(self, char: str) -> bool:
        """Whether ``char`` comes before the bracket that closes the call."""
        if self._quote:
            if self._is_escaped or char == "\\":
                self._is_escaped = not self._is_escaped
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in _CLOSERS:
            self._open.append(_CLOSERS[char])
        elif char in ")]}" and (not self._open or char != self._open.pop()):
            return False
        return True


def _parsed(text: str | None) -> str | None:
    """Keyword arguments as a JSON object; ``None`` if they are not literals. Keys need not be names in Python."""
    if text is None:
        return None
    try:
        found = {key: _as_json(value) for key, value in _keywords(text)}
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return "{" + ", ".join(f"{as_json(key)}: {value}" for key, value in found.items()) + "}"


def _keywords(text: str) -> Iterator[tuple[str, str]]:
    """Keys and the texts of their values. Raises :class:`ValueError` for other arguments."""
    position = len(text) - len(text.lstrip())
    while position < len(text):
        head = _KEY.match(text, position)
        if head is None:
            raise ValueError(text[position:])
        scan, end = _PythonScan(), head.end()
        while end < len(text) and (scan.is_inside or text[end] != ","):
            scan.accepts(text[end])
            end += 1
        yield head[1], text[head.end() : end].strip()
        position = len(text) if end == len(text) else _SPACE.match(text, end + 1).end()  # type: ignore[union-attr]


def _as_json(value: str) -> str:
    """A literal of JSON or Python as JSON."""
    try:
        read_json(value)
    except ValueError:
        found = ast.literal_eval(_JsonConstants().visit(ast.parse(value, mode="eval").body))
        return as_json(found, allow_nan=False)
    return value


class _JsonConstants(ast.NodeTransformer):
    """Reads the constants of JSON as those of Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
