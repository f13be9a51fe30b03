"""Values between tags, where strings stand as they are: what a text means, and a grammar of what a schema allows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from baton.core.errors import InvalidRequestError
from baton.grammar.bounds import MAX_TEXT_LENGTH
from baton.grammar.refusals import refusal
from baton.grammar.schema_walk import Schema, asserting, options_of
from baton.grammar.schemas import FORMATS
from cluster.gateway.formats.base import TokenRefs, as_json, read_json
from cluster.gateway.formats.grammar import ANY_TEXT, json_rule, literal, pattern
from cluster.gateway.formats.schema_branches import JSON_TYPES, alternatives_of, type_of

_ANYTHING = ANY_TEXT.strip("/")
_SPACE = " \t\r\n"
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_BARE = {
    "null": "(null|None)",
    "boolean": "(true|false|True|False)",
    "integer": "-?[0-9]+",
    "number": r"-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?",
}
"""How a text of these types looks."""
_WRITTEN = {
    "null": "null",
    "boolean": "(true|false)",
    "integer": "(0|-?[1-9][0-9]{0,15})",
    "number": r"(0|-?[1-9][0-9]{0,15})(\.[0-9]{1,15})?",
}
"""How values of these types are written where a string may stand as well."""
_FIRST = {"array": r"\[", "object": r"\{", "integer": r"[\-0-9]", "number": r"[\-0-9]"}
_HEX = "[0-9a-fA-F]"
_PATTERNS = {
    "uuid": ({"pattern": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$"},),
    **FORMATS,
}
_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OF_LISTS = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_KEYWORDS = {
    "string": _OF_STRINGS,
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "array": _OF_LISTS,
    "object": _OF_OBJECTS,
}
_OF_ONE_TYPE = frozenset[str]().union(*_KEYWORDS.values())
"""Keywords that say nothing of other types."""


def converted(text: str, types: Sequence[str]) -> str:
    """``text`` as JSON: a value of one of the types if it is one, otherwise a string."""
    bare = text.strip(_SPACE)
    bare = _PYTHON.get(bare, bare)
    try:
        kind = type_of(read_json(bare))
    except (ValueError, RecursionError):
        kind = "string"
    is_allowed = kind in types or (kind == "integer" and "number" in types) or not types
    return bare if is_allowed and kind != "string" else as_json(text)


def holds_json(types: Sequence[str]) -> bool:
    """Whether a value that begins like an object or array of JSON is read as one, which may contain the tag."""
    return "array" in types or "object" in types


def value_rules(name: str, schema: Schema, token: TokenRefs, gap: str, end: str) -> tuple[str, str]:
    """An expression for a value and the tag behind it, and the rules that it needs, whose names begin with ``name``.

    Args:
        gap: white space before ``end``.
        end: the tag.

    Raises:
        InvalidRequestError: a keyword of the schema cannot be honoured.
    """
    alternatives = alternatives_of(schema)
    found, types = alternatives.branches, alternatives.types
    may_be_any = not alternatives.is_exclusive and not all(map(asserting, found))
    if may_be_any or not (any(map(_restrictions, found)) or "string" not in types or holds_json(types)):
        return "string_value", ""
    if unclear := next(
        (each for each in found if options_of(each) is None and each.get("type") not in JSON_TYPES), None
    ):
        raise _unkept(", ".join(sorted(asserting(unclear))))
    if "string" not in types:
        return f"{json_rule(schema)} {literal(gap)} {token(end)}", ""
    texts, values = _Texts(name, end), []
    for branch in found:
        kind, options = branch.get("type"), options_of(branch)
        if options is not None:
            texts.add_options(branch, options, types)
        elif kind == "string":
            texts.add_string(branch)
        elif kind in _WRITTEN and not _restrictions(branch):
            texts.alternatives.append(f"/{_WRITTEN[kind]}/")
        elif kind in _FIRST:
            values.append(branch)
        else:
            raise _unkept(", ".join(sorted(asserting(branch))))
    if alternatives.is_exclusive:
        texts.refuse_overlaps(types)
    expressions, rules = texts.rules(token, gap + end, types, [value["type"] for value in values])
    if values:
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        value = {**shared, "oneOf" if alternatives.is_exclusive else "anyOf": values}
        expressions.append(f"{json_rule(value)} {literal(gap)} {token(end)}")
    if not expressions:
        raise _unkept("an enum without a value that may stand there")
    return f"({' | '.join(expressions)})", rules


def string_value_rules(token: TokenRefs, gap: str, end: str) -> str:
    """The rule ``string_value`` of any text and the tag behind it; see :func:`value_rules`."""
    texts = _Texts("any", end)
    texts.add_string({})
    expressions, rules = texts.rules(token, gap + end, (), ())
    return f"string_value: {' | '.join(expressions)}\n{rules}"


class _Texts:
    """The texts that may stand for a value.

    Attributes:
        alternatives: expressions of terminals.
        strings: for each schema of strings, what must hold for the text at the same time.
    """

    def __init__(self, name: str, end: str) -> None:
        self._name = name
        self._end = end
        self.alternatives: list[str] = []
        self.strings: list[list[str]] = []

    def add_options(self, schema: Schema, options: Sequence[Any], types: Sequence[str]) -> None:
        """Adds those of the values that a text can stand for. Raises as :meth:`add_string`."""
        if others := _restrictions(schema) - {"enum", "const"}:
            raise _unkept(f"enum or const beside {', '.join(sorted(others))}")
        kind = schema.get("type")
        for option in options:
            if kind not in (None, type_of(option)) and (kind, type_of(option)) != ("number", "integer"):
                continue
            text = option if isinstance(option, str) else json.dumps(option, ensure_ascii=False)
            if self._end not in text and converted(text, types) == json.dumps(option, ensure_ascii=False):
                self.alternatives.append(literal(text))

    def add_string(self, schema: Schema) -> None:
        """Adds the strings of a schema. Raises :class:`InvalidRequestError` if a keyword cannot be honoured."""
        if unknown := _restrictions(schema) - _OF_STRINGS:
            raise _unkept(", ".join(sorted(unknown)))
        parts = [schema, *_of_format(schema.get("format"))]
        found = []
        for part in parts:
            least, most = _length(part, "minLength"), _length(part, "maxLength")
            if least or most is not None:
                found.append(f"/(.|\\n){{{math.ceil(least or 0)},{'' if most is None else math.floor(most)}}}/")
            if "pattern" in part:
                found.append(f"/{whole_pattern(part['pattern'])}/")
        self.strings.append(found)

    def refuse_overlaps(self, types: Sequence[str]) -> None:
        """Raises :class:`InvalidRequestError` if a text may be a value of several alternatives."""
        num_options = len(self.alternatives)
        overlap = self.strings and len(self.strings) + num_options > 1
        if overlap or len(set(self.alternatives)) < num_options or {"integer", "number"} <= set(types):
            raise _unkept("oneOf whose alternatives may be equal")

    def rules(self, token: TokenRefs, tail: str, types: Sequence[str], values: Sequence[str]) -> tuple[list[str], str]:
        """Expressions for the texts with ``tail`` behind them, and their rules.

        Args:
            types: of all values.
            values: types whose values have expressions of their own, with which no string may begin.
        """
        others = [kind for kind in types if kind != "string"]
        forbidden = [f"{_ANYTHING}{pattern(self._end)}{_ANYTHING}"]
        for kind in others:
            bare = _FIRST[kind] + _ANYTHING if kind in values or kind not in _BARE else _BARE[kind]
            forbidden.append(f"[ \\t\\r\\n]*{bare}[ \\t\\r\\n]*")
        rules, alternatives = [], list(self.alternatives)
        for index, parts in enumerate(self.strings):
            terminal = f"{self._name}_string_{index}".upper()
            kept = " & ".join([*(parts or [ANY_TEXT]), *(f"~/{each}/" for each in forbidden)])
            rules.append(f"{terminal}: {kept}\n")
            alternatives.append(terminal)
        if not alternatives:
            return [], ""
        text, ref = f"{self._name}_text", token(tail)
        rules.append(f"{text.upper()}: {' | '.join(alternatives)}\n")
        expressions = []
        if "<[" in ref:
            expressions.append(f"{text.upper()} {ref}")
        if '"' in ref:
            rules.append(f"{text}[lazy]: {text.upper()}_END\n{text.upper()}_END: {text.upper()} {literal(tail)}\n")
            expressions.append(text)
        return expressions, "".join(rules)


def whole_pattern(searched: Any) -> str:
    """An expression of the whole texts in which ``searched`` is found.

    Raises:
        InvalidRequestError: it has an anchor elsewhere than at its ends.
    """
    if not isinstance(searched, str):
        raise _unkept("pattern that is not a string")
    tokens = re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", searched, re.DOTALL)
    begins, ends = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    inner = tokens[begins : len(tokens) - ends]
    if any(each in ("^", "$", "\\b", "\\B") for each in inner) or ((begins or ends) and _has_choice(inner)):
        raise _unkept(f"pattern {searched!r:.80}, which has an anchor elsewhere than around the whole,")
    body = "".join(re.sub(r"(?<!\\)/", r"\/", each).replace("\n", r"\n") for each in inner)
    return f"{'' if begins else _ANYTHING}({body}){'' if ends else _ANYTHING}"


def _has_choice(tokens: Sequence[str]) -> bool:
    depth = 0
    for each in tokens:
        depth += (each == "(") - (each == ")")
        if each == "|" and depth == 0:
            return True
    return False


def _of_format(name: Any) -> Sequence[Schema]:
    if name is None:
        return ()
    if name not in _PATTERNS:
        raise _unkept(f"format {name!r:.80}")
    return _PATTERNS[name]


def _length(schema: Schema, key: str) -> float | None:
    found = schema.get(key)
    if found is None or (type(found) in (int, float) and 0 <= found <= MAX_TEXT_LENGTH):
        return found
    raise _unkept(f"{key} {found!r:.80}")


def _restrictions(branch: Schema) -> set[str]:
    """The keywords that say something of the values of the branch's type, other than that."""
    kind = branch.get("type")
    others = _OF_ONE_TYPE - _KEYWORDS.get(kind, frozenset()) if isinstance(kind, str) else frozenset()
    return asserting(branch) - others - {"type"}


def _unkept(what: str) -> InvalidRequestError:
    return refusal(
        f"{what} cannot be kept to where a model writes strings between tags. Leave it "
        "out, or ask for a response_format instead of the call.",
        param="tools",
    )
