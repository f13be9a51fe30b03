"""Strict JSON: parses a request body into one JSON object, or raises a 400 that names the problem."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jiter
import numpy as np

from baton.core.errors import InvalidRequestError, UnsupportedMediaTypeError
from cluster.gateway.formats.base import whole_characters

_CONTENT_TYPE = "application/json"
_MAX_EXACT = 2.0**53
"""Larger floats do not stand for one integer only."""
_DUPLICATE = re.compile(r'Detected duplicate key "(.*)" at line', re.DOTALL)


def check_content_headers(content_type: str | None, content_encoding: str | None) -> None:
    """Raises :class:`UnsupportedMediaTypeError` unless the headers announce plain UTF-8 JSON.

    The type must be given: without it, a web page could send a body to this machine without its browser asking first.
    """
    check_content_encoding(content_encoding)
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


def check_content_encoding(content_encoding: str | None) -> None:
    """Raises :class:`UnsupportedMediaTypeError` for a compressed body."""
    if content_encoding is not None and content_encoding.strip().lower() != "identity":
        raise UnsupportedMediaTypeError(
            f"Content-Encoding {content_encoding[:60]!r} is not supported; send the body uncompressed."
        )


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """How much a body may hold, so that parsing it is quick.

    Attributes:
        max_entries: entries of all arrays and objects together, counted by their commas and brackets.
        max_keys: keys of all objects together.
    """

    max_entries: int = 2**18
    max_keys: int = 2**15


def json_limits(max_model_len: int) -> JsonLimits:
    """The limits for a model's context, in tokens: token ids are entries of arrays."""
    return JsonLimits(max_entries=max(JsonLimits().max_entries, 4 * max_model_len))


def parse_object(body: bytes, limits: JsonLimits = JsonLimits()) -> dict[str, Any]:
    """The JSON object in ``body``, which may begin with a byte order mark (RFC 8259, section 8.1).

    Half a character, which remains where a client cuts a string within one, becomes U+FFFD, as in browsers.

    Raises:
        InvalidRequestError: it has too many entries, or is not UTF-8, not JSON (NaN and Infinity are not JSON), nested
            too deeply, not an object, or an object that names a key twice.
    """
    _check_counts(body, limits)
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        value = _from_json(body)
    except ValueError as error:
        if found := _DUPLICATE.match(str(error)):
            key = found[1][:60]
            raise InvalidRequestError(f"The key {key!r} occurs twice in one JSON object.", param=key) from error
        try:
            body.decode()
        except UnicodeDecodeError as wrong:
            raise InvalidRequestError(
                f"The request body is not UTF-8: byte {wrong.start} is 0x{body[wrong.start]:02X}. Encode it as UTF-8."
            ) from error
        reason = str(error).replace("recursion limit exceeded", "it is nested too deeply")
        raise InvalidRequestError(f"The request body is not valid JSON: {reason}.") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The request body must be a JSON object, got {json_type(value)}.")
    return value


def _from_json(body: bytes) -> Any:
    try:
        return jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        if "hex escape" not in str(error):
            raise
    return jiter.from_json(whole_characters(body), allow_inf_nan=False, catch_duplicate_keys=True)


def _check_counts(body: bytes, limits: JsonLimits) -> None:
    """Raises :class:`InvalidRequestError` for a body beyond the limits. Marks within strings do not count."""
    if len(body) <= limits.max_keys or (
        _count(body, b",[{") <= limits.max_entries and _count(body, b":") <= limits.max_keys
    ):
        return
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = _count(body, b'"') // 2
    if num_strings <= limits.max_entries + limits.max_keys:  # otherwise it has too many already
        body = b"".join(body.split(b'"')[::2])
    for count, limit, what in (
        (_count(body, b",[{"), limits.max_entries, "entries of arrays and objects"),
        (_count(body, b":"), limits.max_keys, "keys"),
        (num_strings, limits.max_entries + limits.max_keys, "strings"),
    ):
        if count > limit:
            raise InvalidRequestError(
                f"The request body has {count} {what}; at most {limit} are allowed. Send several smaller requests."
            )


def _count(body: bytes, marks: bytes) -> int:
    """How many bytes are one of ``marks``; many times as fast as ``bytes.count`` where they are frequent."""
    values = np.frombuffer(body, dtype=np.uint8)
    return sum(int(np.count_nonzero(values == mark)) for mark in marks)


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """What an object holds. Null means absent under any name: clients' models of requests and messages have more keys
    than they use."""
    return {name: value for name, value in values.items() if value is not None}


def whole(value: Any) -> Any:
    """``value`` with whole numbers as integers, which some languages write as 64.0."""
    if isinstance(value, list):
        return [whole(item) for item in value] if set(map(type, value)) & {float, list} else value
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _MAX_EXACT else value


def check_finite(value: Any, where: str) -> None:
    """
    Raises:
        InvalidRequestError: a number in ``value``, which stands at ``where``, is too large for a float, as 1e999 is.
    """
    if not _is_finite(value):
        raise InvalidRequestError(
            f"{where} has a number beyond 1.8e308, which is too large for a float. Lower it.", param=where
        )


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


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
