"""Strict JSON: parses a request body into one JSON object, or raises a 400 that names the problem."""

from __future__ import annotations

import json
from typing import Any

import orjson

from baton.core.errors import InvalidRequestError, UnsupportedMediaTypeError

_CONTENT_TYPE = "application/json"


def check_content_headers(content_type: str | None, content_encoding: str | None) -> None:
    """Raises :class:`UnsupportedMediaTypeError` unless the headers announce plain UTF-8 JSON.

    The type must be given: without it, a web page could send a body to this machine without its browser asking first.
    """
    if content_encoding is not None and content_encoding.strip().lower() != "identity":
        raise UnsupportedMediaTypeError(
            f"Content-Encoding {content_encoding[:60]!r} is not supported; send the body uncompressed."
        )
    media_type, *parameters = [part.strip().lower() for part in (content_type or "").split(";")]
    if media_type != _CONTENT_TYPE:
        found = "is missing" if content_type is None else f"is {content_type[:60]!r}"
        raise UnsupportedMediaTypeError(
            f"Content-Type {found} and must be {_CONTENT_TYPE}. With curl, add -H 'Content-Type: {_CONTENT_TYPE}', "
            "or use --json instead of -d."
        )
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8"):
            raise UnsupportedMediaTypeError(f"The body must be UTF-8, but Content-Type says charset {value[:40]!r}.")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises:
        InvalidRequestError: not UTF-8, not JSON (NaN, Infinity and lone surrogates are not JSON), nested too deeply,
            not an object, or an object that names a key twice.
    """
    try:
        value = orjson.loads(body)
        # orjson silently keeps the last of two equal keys.
        json.loads(body, object_pairs_hook=_refuse_duplicates)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise InvalidRequestError("The request body is not valid JSON: it is nested too deeply.") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The request body must be a JSON object, got {json_type(value)}.")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequestError(f"The key {key[:60]!r} occurs twice in one JSON object.", param=key[:60])
            seen.add(key)


def json_type(value: object) -> str:
    """JSON's name of the type of ``value`` with an article, for error messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "an array"
    return "an object"


def shown(value: object, max_chars: int = 60) -> str:
    """``value`` for an error message: scalars are shown, long strings cut; containers only appear as their type."""
    if value is None or isinstance(value, (bool, int, float)):
        text = json.dumps(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
        return text
    if isinstance(value, str):
        return repr(value if len(value) <= max_chars else value[:max_chars] + "…")
    if isinstance(value, (list, dict)) and not value:
        return "[]" if isinstance(value, list) else "{}"
    return json_type(value)
