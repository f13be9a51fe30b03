"""``[name(key=value, …), …]``, with or without ``<|python_start|>``: Llama 3.2 and 4."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cluster.gateway.formats.base import Arguments, CallEnd, CallRule, CallStart, Function, Steps, Text, TokenRefs
from cluster.gateway.formats.calls import Attempt, call_list
from cluster.gateway.formats.grammar import alternatives, json_rule, listed, literal, unmarked_rule
from cluster.gateway.formats.keyword_arguments import keyword_rules
from cluster.gateway.formats.source import Source, Wait

START, END = "<|python_start|>", "<|python_end|>"
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
        arguments = [
            keyword_rules(f"arguments_{index}", rule.schema_of(function), _keyword_rule, "any_keyword", ", ")
            for index, function in enumerate(rule.functions)
        ]
        calls = listed(rule, "body")
        keyword = f'any_keyword: NAME "=" any_value\nNAME: /[A-Za-z_][A-Za-z0-9_]*/\nany_value: {json_rule({})}\n'
        return unmarked_rule(rule, calls, r"\[") + keyword + alternatives("body", bodies) + "".join(arguments)


def _keyword_rule(key: str, schema: Mapping[str, Any]) -> str:
    return f"{literal(f'{key}=')} {json_rule(schema)}"


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
    """Keyword arguments as a JSON object; ``None`` if they are not literals."""
    if text is None:
        return None
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        found = {keyword.arg: ast.literal_eval(_JsonConstants().visit(keyword.value)) for keyword in call.keywords}
        return None if None in found else json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _JsonConstants(ast.NodeTransformer):
    """Reads the constants of JSON as those of Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
