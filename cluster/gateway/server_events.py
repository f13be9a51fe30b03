"""The bytes of server-sent events."""

from __future__ import annotations

from typing import Any

import orjson

DONE_EVENT = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
"""Clients ignore it, and proxies see that the stream lives."""


def encode_event(data: Any) -> bytes:
    """Encodes one event with ``data`` as JSON."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def encode_typed_event(data: dict[str, Any]) -> bytes:
    """Like :func:`encode_event`, for clients that want the type of ``data`` as the event's name, too."""
    return f"event: {data['type']}\n".encode() + encode_event(data)
