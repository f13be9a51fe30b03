"""Errors in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.core.errors import BatonError

_PATH = "/v1/messages"
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_INVALID = "invalid_request_error"
_THREAD_REFUSED = "thread_unsupported_request"
"""Makes Anthropic's clients send the whole conversation instead of a thread."""


def has_anthropic_form(path: str) -> bool:
    """Whether answers under ``path`` are in Anthropic's form."""
    return path == _PATH or path.startswith(_PATH + "/")


def anthropic_error(error: BatonError, request_id: str) -> dict[str, Any]:
    """The body of an answer, and the data of an event."""
    kind = _TYPES.get(error.http_status, _INVALID)
    found: dict[str, Any] = {"type": kind, "message": error.message}
    if error.param == "thread":
        found["details"] = {"error_code": _THREAD_REFUSED}
    return {"type": "error", "error": found, "request_id": request_id}
