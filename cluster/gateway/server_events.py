"""The bytes of answers in JSON, and of server-sent events."""

from __future__ import annotations

import json
from typing import Any

import orjson

DONE_EVENT = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
"""Clients ignore it, and proxies see that the stream lives."""
_LINE_ENDS = [(char.encode(), json.dumps(char)[1:-1].encode()) for char in "\x85\u2028\u2029"]
"""Characters where some clients end a line, as Python's ``splitlines`` does, and their escapes in JSON."""


def json_bytes(value: Any) -> bytes:
    """``value`` as JSON, with null for numbers that are not finite.

    Clients may have sent more than orjson writes: integers beyond 64 bits, halves of characters, and more than 254
    levels.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":")).encode()


def encode_event(data: Any) -> bytes:
    """Encodes one event with ``data`` as JSON, in one line for every client."""
    encoded = json_bytes(data)
    for line_end, escape in _LINE_ENDS:
        encoded = encoded.replace(line_end, escape)
    return b"data: " + encoded + b"\n\n"


def encode_typed_event(data: dict[str, Any]) -> bytes:
    """Like :func:`encode_event`, for clients that want the type of ``data`` as the event's name, too."""
    return f"event: {data['type']}\n".encode() + encode_event(data)
