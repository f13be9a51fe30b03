"""Bounds of grammars whose compilation takes time that no limit of llguidance ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import Any

from baton.core.errors import InvalidRequestError
from baton.grammar.gbnf import client_names
from baton.grammar.refusals import refusal
from baton.grammar.schema_walk import DATA_KEYS, asserting, objects_of
from baton.grammar.schemas import is_read_exactly, schemas_of

MAX_MULTIPLE_OF = 10_000
MAX_PATTERN_PROPERTIES = 100
MAX_TEXT_LENGTH = 2**32 - 1
"""Of ``minLength`` and ``maxLength``."""
MIN_WHOLE_NUMBER, MAX_WHOLE_NUMBER = -(2**63), 2**64 - 1
"""Those that llguidance can read."""
MAX_RULE_DEPTH = 500
"""Of rules that lead to each other. llguidance reports an error with the line of each of them, in quadratic time: two
seconds for this number, a quarter of an hour for all that fit into a grammar."""
_NUMBER_KEYS = frozenset({"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
MIN_NUMBER = -9 * 10**18
"""Of values and upper bounds. With smaller ones, llguidance ends the process: they become -2^63, whose sign it cannot
change."""
_NO_NAMES = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*|/(?:\\.|[^/\\\n])++/?')
"""Strings, comments and regular expressions in Lark's notation."""
_RULE_NAME = re.compile(r"^[ \t]*[?!]*(\w++)[^:\n|]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPTIONS = re.compile(r"%llguidance\s*")
_KNOWN_OPTIONS = ("allow_initial_skip", "ignore_once")
_UNKEPT_ATTRIBUTE = re.compile(r"^[ \t]*[?!]*(\w++)\s*\[[^\]]*\b(temperature|max_tokens)\b", re.MULTILINE)
_FREE_NEGATION = re.compile(r"(?<!&)(?<!& )~(?! ?\d)")
"""A negation that is not behind ``&``; before a number, the sign is a repetition."""


def check_bounds(parts: Iterable[Mapping[str, Any]]) -> None:
    """Checks the schemas and rules of a grammar's parts.

    Args:
        parts: the ``grammars`` of llguidance's JSON form.

    Raises:
        InvalidRequestError: compiling one of them could take from seconds to minutes; the message names the keyword or
            the rule.
    """
    for part in parts:
        for schema in schemas_of(part):
            for found in objects_of(schema):
                _check_keywords(found)
        if part.get("lark_grammar"):
            _check_rules(part["lark_grammar"])


def check_whole_numbers(schema: Mapping[str, Any]) -> None:
    """Checks all whole numbers of a schema.

    Raises:
        InvalidRequestError: one of them has more than 64 bits; the message names the keyword.
    """
    for keyword, number in _numbers(schema):
        if isinstance(number, int) and not MIN_WHOLE_NUMBER <= number <= MAX_WHOLE_NUMBER:
            raise InvalidRequestError(
                f"The JSON schema cannot be honoured: {keyword} has a whole number outside of -2^63 to 2^64 - 1. Use a "
                "smaller one or leave it out."
            )


def _numbers(value: Any, keyword: str = "") -> Iterator[tuple[str, int | float]]:
    """All numbers in a value, each with the keyword that it belongs to."""
    left = [(keyword, value)]
    while left:
        keyword, value = left.pop()
        if isinstance(value, Mapping):
            left += ((keyword if keyword in DATA_KEYS else key, inner) for key, inner in value.items())
        elif isinstance(value, list):
            left += ((keyword, inner) for inner in value)
        elif isinstance(value, int | float):
            yield keyword, value


def _check_keywords(schema: dict[str, Any]) -> None:
    for key in _NUMBER_KEYS & schema.keys():
        for _, number in _numbers(schema[key]):
            if not isfinite(number):
                raise refusal(f"{key} has a number that is too large for JSON, or none.")
            if number < MIN_NUMBER and key not in ("minimum", "exclusiveMinimum"):
                raise refusal(f"{key} has a number below {MIN_NUMBER:,}. Use a larger one.")
            if isinstance(number, int) and not _is_kept(number, key):
                raise refusal(f"{key} has a whole number that would be rounded. Use one from -(2^53 - 1) to 2^53 - 1.")
            if key in DATA_KEYS and isinstance(number, float) and not is_read_exactly(number):
                raise refusal(f"{key} has the number {number}, which would be rounded. Use one with up to 15 digits.")
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and abs(multiple) > MAX_MULTIPLE_OF:
        raise refusal(f"multipleOf is {multiple}; at most {MAX_MULTIPLE_OF:,} is allowed.")
    for key in ("minLength", "maxLength"):
        length = schema.get(key)
        if isinstance(length, int | float) and length > MAX_TEXT_LENGTH:
            raise refusal(f"{key} is {length}; at most {MAX_TEXT_LENGTH:,} is allowed.")
    if isinstance(schema.get("required"), bool) and len(asserting(schema)) > 1:
        raise refusal("required must be an array of names, in the schema of the object that has the property.")
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
        raise refusal(
            f"patternProperties has {len(patterns)} patterns; at most "
            f"{MAX_PATTERN_PROPERTIES} are allowed. Merge them into fewer expressions."
        )
    _check_least_properties(schema)


def _check_least_properties(schema: Mapping[str, Any]) -> None:
    """Refuses ``minProperties`` where keys that are not listed could be repeated to reach it."""
    least, listed = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, listed))) if isinstance(listed, list) else 0
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    kinds = schema.get("type", "object")
    is_object = "object" in (kinds if isinstance(kinds, list) else [kinds])
    if isinstance(least, int | float) and least > num_required + 1 and is_object and not is_closed:
        raise refusal(
            f"minProperties is {least}, but keys that are not in required could be "
            "repeated to reach it. List the keys in required, or ask for an array of pairs."
        )


def _is_kept(number: int, key: str) -> bool:
    """Whether llguidance, which computes with numbers of 64 bits with and without a fraction, keeps the number."""
    if number >= 2**63 - 1:
        return number == 2**63 - 1 or key in ("maximum", "exclusiveMaximum")
    return int(float(number)) == number


def _check_rules(lark: str) -> None:
    """Follows the rules from each to the next in the order in which llguidance compiles them."""
    _check_options(lark)
    rules, clients = _rules(lark), client_names(lark)
    seen: set[str] = set()
    for first in rules:
        open_rules = [iter([first])]
        while open_rules:
            name = next(open_rules[-1], None)
            if name is None:
                open_rules.pop()
            elif name in rules and name not in seen:
                seen.add(name)
                open_rules.append(iter(rules[name]))
                if len(open_rules) > MAX_RULE_DEPTH + 1:
                    raise refusal(
                        f"more than {MAX_RULE_DEPTH} rules lead to each other from "
                        f"{clients.get(first, first)} to {clients.get(name, name)}. Merge some of them."
                    )


def _rules(lark: str) -> dict[str, list[str]]:
    """The names in each rule's definition, in their order. ``start``, where compilation begins, is the first rule.

    Raises:
        InvalidRequestError: a rule has a negation outside of an intersection.
    """
    text = _NO_NAMES.sub('""', lark)
    names = list(_RULE_NAME.finditer(text))
    starts = [match.start() for match in names] + [len(text)]
    _check_negations("%ignore", text[: starts[0]])
    rules: dict[str, list[str]] = {}
    for match, end in zip(names, starts[1:], strict=True):
        _check_negations(match[1], text[match.end() : end])
        rules[match[1]] = _NAME.findall(text, match.end(), end)
    return {"start": rules.pop("start", []), **rules}


def _check_options(lark: str) -> None:
    """Refuses what llguidance accepts and does not keep to, or where a mask depends on more than the tokens before it:
    on how they were forced, or on the steps in which they came."""
    end = 0
    while found := _OPTIONS.search(lark, end):
        end = found.end()
        try:
            options, end = json.JSONDecoder().raw_decode(lark, end)
        except ValueError:  # the compiler says what is wrong
            continue
        for name in options if isinstance(options, dict) else ():
            if name not in _KNOWN_OPTIONS:
                raise refusal(
                    f"the option {name!r:.60} of %llguidance is not supported. Leave "
                    f"it out; known are {' and '.join(_KNOWN_OPTIONS)}."
                )
    if found := _UNKEPT_ATTRIBUTE.search(_NO_NAMES.sub('""', lark)):
        raise refusal(
            f"the rule {found[1]:.60} has {found[2]}, which only the whole answer can "
            f"have. Leave it out, and send the parameter {found[2]}."
        )


def _check_negations(name: str, definition: str) -> None:
    """Refuses ``~`` that is not behind ``&``. Alone, it also allows bytes that are no text, such as those that stand
    for the end of an answer."""
    if _FREE_NEGATION.search(" ".join(definition.split())):
        raise refusal(
            f"in the rule {name}: ~ must follow &, as in WORD: /[a-z]+/ & ~/if|else/. Write what is allowed before it."
        )
