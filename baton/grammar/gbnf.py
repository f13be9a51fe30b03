"""GBNF, the notation of llama.cpp, as Lark's notation."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator

from llguidance import gbnf_to_lark
from llguidance.gbnf_to_lark import AlternativeNode, ASTNode, LiteralNode, RepetitionNode, RuleRefNode

from baton.core.errors import InvalidRequestError

MAX_GBNF_CHARS = 16 * 1024
"""Translating GBNF into Lark's notation takes quadratic time: half a second for this length."""
MAX_GBNF_NESTING = 100
"""Of parentheses in parentheses, which the translation follows by recursion."""
_RULE_NAME = re.compile(r"^\s*([\w-]+)\s*::=", re.MULTILINE)
_PARENTHESES = re.compile(r'"(?:\\.|[^"\\])*+"?|\[(?:\\.|[^\]\\])*+\]?|#[^\n]*+|([()])')
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ORIGIN = "//: "
"""The beginning of the comment above each rule of a translation, with the name that the client gave it."""
_RULE = re.compile(rf"^{_ORIGIN}(.*)\n(\w+):", re.MULTILINE)


def is_gbnf(text: str) -> bool:
    return _RULE_NAME.search(text) is not None


def lark_of_gbnf(text: str) -> str:
    """Translates a grammar.

    Raises:
        InvalidRequestError: it cannot be read, is too large or nested too deeply, or defines a rule twice; the message
            has the client's names.
    """
    if len(text) > MAX_GBNF_CHARS:
        raise InvalidRequestError(
            f"The GBNF grammar has {len(text)} characters; at most {MAX_GBNF_CHARS} are allowed. Write a larger "
            "one in Lark's notation."
        )
    if _nesting(text) > MAX_GBNF_NESTING:
        raise InvalidRequestError(
            f"The GBNF grammar has more than {MAX_GBNF_NESTING} parentheses in each other. Make rules of some."
        )
    names = Counter(_RULE_NAME.findall(_PARENTHESES.sub("", text)))
    if repeated := next((name for name, number in names.items() if number > 1), None):
        raise InvalidRequestError(
            f"The GBNF grammar defines the rule {repeated} twice. Make one rule of both, with | between them."
        )
    try:
        return _translated(text)
    except Exception as error:  # the parser raises whatever it meets
        raise InvalidRequestError(f"The GBNF grammar cannot be read: {str(error)[:300]}") from error


def client_names(lark: str) -> dict[str, str]:
    """The client's names of the rules by their names in a translation; empty for other grammars."""
    return {name: origin for origin, name in _RULE.findall(lark)}


def client_rule(lark: str, line: int) -> str | None:
    """The client's name of the rule at a line (from 1) of a translation; ``None`` for other grammars."""
    origins = [text for text in lark.split("\n")[:line] if text.startswith(_ORIGIN)]
    return origins[-1].removeprefix(_ORIGIN) if origins else None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for found in _PARENTHESES.finditer(text):
        depth += {"(": 1, ")": -1}.get(found[1], 0)
        deepest = max(deepest, depth)
    return deepest


def _translated(text: str) -> str:
    """The library's translation, with names that do not collide, nested repetitions and all escapes of GBNF."""
    rules = gbnf_to_lark.GrammarParser().parse(_ESCAPE.sub(_plain_escape, text))
    origins = {id(rule): name for name, rule in rules.items()}
    names = {name: name if name == "root" else f"r{index}" for index, name in enumerate(rules)}
    for origin, rule in rules.items():
        rule.name, rule.comment = names[origin], ""
        for node in _nodes(rule):
            if isinstance(node, RuleRefNode):
                if node.name not in names:
                    raise ValueError(f"the rule {origin} refers to {node.name}, which is not defined")
                node.name = names[node.name]
            elif isinstance(node, LiteralNode):
                node.value = _lark_text(node.value)
    rules = {rule.name: rule for rule in rules.values()}
    gbnf_to_lark.resolve(rules)
    for rule in rules.values():
        for node in _nodes(rule):
            if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
                node.node = AlternativeNode([node.node])
    ordered = sorted(rules.values(), key=lambda rule: rule.order)
    return "%llguidance {}\n" + "".join(f"{_ORIGIN}{origins[id(rule)]}\n{rule}\n" for rule in ordered)


def _lark_text(text: str) -> str:
    """The content of a string in Lark's notation, where brackets are not escaped and line breaks are."""
    text = _ESCAPE.sub(lambda found: found[3] if found[3] in ("[", "]") else found[0], text)
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _plain_escape(found: re.Match[str]) -> str:
    """An escape that the library's parser reads as it is meant: it loses leading zeros."""
    digits = found[1] or found[2]
    if not digits:
        return found[0]
    code = int(digits, 16)
    is_character = 0x80 <= code < 0xD800 or 0xE000 <= code <= sys.maxunicode
    return f"\\x{code:02x}" if code < 0x80 else chr(code) if is_character else found[0]


def _nodes(node: ASTNode) -> Iterator[ASTNode]:
    yield node
    for child in node.children():
        yield from _nodes(child)
