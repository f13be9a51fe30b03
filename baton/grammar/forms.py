"""Grammars from what clients send: JSON schemas, regular expressions, choices, and the notations of Lark and GBNF.

A grammar is a text in llguidance's own JSON form, so that all processes speak of one thing. Whether it can be compiled
says :meth:`baton.grammar.compiler.GrammarCompiler.compile`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from baton.core.errors import InvalidRequestError
from baton.grammar.bounds import check_whole_numbers
from baton.grammar.gbnf import is_gbnf, lark_of_gbnf

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space of Python's ``json.dumps``, which models are trained on. With free white space, a small model can
fill its answer with it."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_grammar(schema: Mapping[str, Any] | bool, *, whitespace: str | None = None, is_compact: bool = False) -> str:
    """JSON documents that a schema allows, with keys in the schema's order.

    Documents have the white space of :data:`JSON_STYLE`, unless the arguments say otherwise.

    Args:
        schema: a JSON Schema. Unsupported keywords are refused when the grammar is compiled.
        whitespace: a regular expression for white space between all elements, of JSON's characters.
        is_compact: no white space at all.
    """
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False, **JSON_STYLE}
    if is_compact or whitespace is not None:
        options |= {"item_separator": ",", "key_separator": ":"}
    if whitespace is not None:
        options |= {"whitespace_flexible": True, "whitespace_pattern": _white_space(whitespace)}
    try:
        check_whole_numbers(_object_of(schema))
        return LLMatcher.grammar_from_json_schema(_object_of(schema), overrides=options)
    except RecursionError as error:
        raise InvalidRequestError("The JSON schema is nested too deeply; use $defs and $ref.") from error
    except ValueError as error:
        raise InvalidRequestError(f"The JSON schema cannot be read: {str(error)[:300]}") from error


def regex_grammar(pattern: str) -> str:
    """Texts that a regular expression matches as a whole, in the syntax of Rust's ``regex``.

    Raises:
        InvalidRequestError: its last backslash escapes nothing, which the compiler would overlook.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidRequestError("The regular expression ends with a backslash that escapes nothing.")
    return LLMatcher.grammar_from_regex(pattern)


def beyond_white_space(pattern: str) -> str:
    """Texts that the regular expression of white space matches and that are none in JSON. Raises what
    :func:`regex_grammar` does."""
    lark = json.loads(regex_grammar(_white_space(pattern)))["grammars"][0]["lark_grammar"]
    return LLMatcher.grammar_from_lark(f"start: W\nW: {lark.removeprefix('start: ')} & ~/[ \\t\\r\\n]*/")


def choice_grammar(choices: Sequence[str]) -> str:
    """One of some texts."""
    return regex_grammar("|".join(f"(?:{_escaped(choice)})" for choice in choices))


def notation_grammar(text: str) -> str:
    """A grammar in Lark's notation, as llguidance extends it, or in GBNF (``name ::= …``).

    Raises:
        InvalidRequestError: a GBNF grammar that cannot be read.
    """
    return LLMatcher.grammar_from_lark(lark_of_gbnf(text) if is_gbnf(text) else text)


def _white_space(pattern: str) -> str:
    """An expression for white space in which ``\\s`` is that of JSON, without what else Unicode calls so."""
    return re.sub(r"\\(.)", lambda found: r"[ \t\r\n]" if found[1] == "s" else found[0], pattern, flags=re.DOTALL)


def _object_of(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """A schema as an object; ``true`` and ``false`` are schemas, too."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return dict(schema)


def _escaped(text: str) -> str:
    """An expression of Rust's ``regex`` that matches ``text`` alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", lambda found: "\\" + found[0], text)
