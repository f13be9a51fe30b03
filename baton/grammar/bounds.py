"""Bounds of schemas whose compilation takes time that no limit of llguidance ends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from baton.core.errors import InvalidRequestError

MAX_MULTIPLE_OF = 100_000
MAX_PATTERN_PROPERTIES = 100
_INLINE = "%json "
_DATA_KEYS = frozenset({"const", "default", "enum", "examples"})
"""Keys of a schema whose values are data instead of schemas."""


def check_schemas(parts: Iterable[Mapping[str, Any]]) -> None:
    """Checks the schemas of a grammar's parts.

    Args:
        parts: the ``grammars`` of llguidance's JSON form.

    Raises:
        InvalidRequestError: compiling one of them could take from seconds to minutes; the message names the keyword.
    """
    for schema in _schemas(parts):
        _check(schema)


def _schemas(parts: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """The schemas that are parts of the grammar, or stand inside of one in Lark's notation."""
    for part in parts:
        if "json_schema" in part:
            yield part["json_schema"]
        lark = part.get("lark_grammar") or ""
        start = lark.find(_INLINE)
        while start >= 0:
            try:
                schema, _ = json.JSONDecoder().raw_decode(lark, start + len(_INLINE))
                yield schema
            except ValueError:  # the compiler says what is wrong
                pass
            start = lark.find(_INLINE, start + 1)


def _check(schema: Any) -> None:
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            _check_keywords(value)
            left += (inner for key, inner in value.items() if key not in _DATA_KEYS)


def _check_keywords(schema: dict[str, Any]) -> None:
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and abs(multiple) > MAX_MULTIPLE_OF:
        raise InvalidRequestError(
            f"The grammar cannot be honoured: multipleOf is {multiple}; at most {MAX_MULTIPLE_OF:,} is allowed."
        )
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
        raise InvalidRequestError(
            f"The grammar cannot be honoured: patternProperties has {len(patterns)} patterns; at most "
            f"{MAX_PATTERN_PROPERTIES} are allowed. Merge them into fewer expressions."
        )
