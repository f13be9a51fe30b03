"""The bytes of answers in JSON, and of server-sent events."""

from __future__ import annotations

import json
from typing import Any

import orjson

from baton.core.json_lines import in_one_line

DONE_EVENT = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
"""Clients ignore it, and proxies see that the stream lives."""


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
    return b"data: " + in_one_line(json_bytes(data)) + b"\n\n"


def encode_typed_event(data: dict[str, Any]) -> bytes:
    """Like :func:`encode_event`, for clients that want the type of ``data`` as the event's name, too."""
    return f"event: {data['type']}\n".encode() + encode_event(data)
