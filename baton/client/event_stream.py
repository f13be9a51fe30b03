"""Server-sent events as OpenAI-compatible servers write them, from raw bytes, with as little work as will do."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"[DONE]"
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class EventSplitter:
    """Cuts a byte stream into the payloads of its ``data:`` lines, wherever the network cut it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that are complete now."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def parse_event(payload: bytes) -> dict[str, Any]:
    """
    Raises:
        ValueError: not a JSON object.
    """
    values = orjson.loads(payload)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def has_text(event: dict[str, Any]) -> bool:
    """Whether the chunk brings a part of an answer, and not only a role, an end or a count."""
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
    """Code and message of an error event; None for any other."""
    error = event.get("error")
    if error is None:
        return None
    if not isinstance(error, dict):
        return "error", str(error)
    return str(error.get("code") or error.get("type") or "error"), str(error.get("message") or "")
