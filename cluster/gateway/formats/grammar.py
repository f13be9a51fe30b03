"""Pieces of grammars in llguidance's Lark dialect (its docs/syntax.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.grammar.bounds import check_whole_numbers
from baton.grammar.forms import JSON_STYLE
from cluster.gateway.formats.base import CallRule, TokenRefs

ANY_TEXT = r"/(.|\n)*/"


def literal(text: str) -> str:
    """``text`` as a string."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """``text`` inside a regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n").replace("\\ ", " ")


def json_rule(schema: Mapping[str, Any]) -> str:
    """A JSON value that follows ``schema``."""
    check_whole_numbers(schema)
    return "%json " + json.dumps({**schema, "x-guidance": JSON_STYLE}, ensure_ascii=False)


def object_call_rules(rule: CallRule, arguments_key: str) -> str:
    """Rules of ``body``: ``{"name": …, "arguments": {…}}`` for one of the functions."""
    heads = ["{" + f'"name": {literal(function.name)}, "{arguments_key}": ' for function in rule.functions]
    return alternatives("body", [f'{literal(head)} arguments_{i} "}}"' for i, head in enumerate(heads)]) + (
        argument_rules(rule)
    )


def argument_rules(rule: CallRule) -> str:
    """Rules ``arguments_0``, ``arguments_1``, … of the functions' arguments as JSON."""
    return "".join(
        f"arguments_{index}: {json_rule(rule.schema_of(function))}\n" for index, function in enumerate(rule.functions)
    )


def alternatives(name: str, options: Sequence[str]) -> str:
    return f"{name}: " + "\n    | ".join(options) + "\n"


def up_to(name: str, token: TokenRefs, mark: str) -> str:
    """Text up to a mark, which is included. A special token cannot be a part of text. See :func:`up_to_rules`."""
    ref = token(mark)
    options = ([f"text_{name} {ref}"] if "<[" in ref else []) + ([name] if '"' in ref else [])
    return f"({' | '.join(options)})"


def up_to_rules(name: str, mark: str) -> str:
    """The rules that :func:`up_to` names."""
    return f"text_{name}: {ANY_TEXT}\n{name}[lazy]: /(.|\\n)*{pattern(mark)}/\n"


def many(rule: CallRule, first: str, further: str) -> str:
    """One call, or several."""
    return first if rule.is_single else f"{first} ({further})*"


def listed(rule: CallRule, call: str) -> str:
    """One call or several in brackets."""
    further = f'", " {call}'
    return f'"[" {many(rule, call, further)} "]"'


def unmarked_rule(rule: CallRule, calls: str, first: str) -> str:
    """The rule ``calls`` of forms without a mark: free text must not begin with the character ``first``."""
    if rule.is_required:
        return f"calls: {calls}\n"
    if rule.answer:
        return f"calls: {rule.answer} | {calls}\n"
    return f"calls: TEXT | {calls}\nTEXT: /([^{first}](.|\\n)*)?/\n"


def calls_rule(rule: CallRule, token: TokenRefs, opener: str, rest: str) -> str:
    """The rule ``calls``: what begins with ``opener`` and goes on with ``rest``, or text if no call is required."""
    if rule.is_required:
        return f"calls: {token(opener)} {rest}\n"
    if rule.answer:
        return f"calls: {rule.answer} | {token(opener)} {rest}\n"
    return f"calls: text | {up_to('head', token, opener)} {rest}\ntext: {ANY_TEXT}\n" + up_to_rules("head", opener)
