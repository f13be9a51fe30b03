"""A fast parser of server-sent events from OpenAI-compatible servers."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"[DONE]"
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class EventSplitter:
    """Splits a byte stream, cut anywhere by the network, into the payloads of its ``data:`` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Adds bytes. Returns the payloads that are complete now."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def parse_event(payload: bytes) -> dict[str, Any]:
    """The JSON object in a payload. Raises :class:`ValueError` if it is not one."""
    values = orjson.loads(payload)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def has_text(event: dict[str, Any]) -> bool:
    """Whether the chunk contains a part of an answer, rather than only a role, a finish reason or usage."""
    for choice in event.get("choices") or ():
        if choice.get("text") or choice.get("token_ids"):
            return True
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in _TEXT_FIELDS):
            return True
    return False


def has_choice(event: dict[str, Any]) -> bool:
    return bool(event.get("choices"))


def error_in(event: dict[str, Any]) -> tuple[str, str] | None:
    """Code and message of an error event; ``None`` for other events."""
    error = event.get("error")
    if error is None:
        return None
    if not isinstance(error, dict):
        return "error", str(error)
    return str(error.get("code") or error.get("type") or "error"), str(error.get("message") or "")
