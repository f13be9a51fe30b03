"""When an HTTP request came, when work on it began, and when its answer was out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RECEIVED_KEY = "received_s"
"""The server may write it into ``scope["state"]``: when the request reached this machine, on the monotonic clock."""

_ACCEPTED_KEY = "accepted_s"
_WHEN_OVER_KEY = "when_over"


@dataclass(frozen=True, slots=True)
class ArrivalTimes:
    """Seconds of the monotonic clock.

    Attributes:
        received_s: when the request reached this machine, as far as the server knows.
        accepted_s: when the application began to work on it.
    """

    received_s: float
    accepted_s: float


def arrival_of(request: Request) -> ArrivalTimes:
    """What :class:`RequestTimesMiddleware` knows of a request."""
    state = request.scope["state"]
    return ArrivalTimes(state[RECEIVED_KEY], state[_ACCEPTED_KEY])


def call_when_over(request: Request, callback: Callable[[bool], None]) -> None:
    """``callback`` is called once: with True when the last byte of the response was handed to the connection, with
    False when the request ended without that. Several are called in order."""
    request.scope["state"].setdefault(_WHEN_OVER_KEY, []).append(callback)


class RequestTimesMiddleware:
    """Has to be the outermost one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state[_ACCEPTED_KEY] = time.monotonic()
        state.setdefault(RECEIVED_KEY, state[_ACCEPTED_KEY])

        client_left = False

        async def receive_and_look() -> Message:
            nonlocal client_left
            message = await receive()
            client_left = client_left or message["type"] == "http.disconnect"
            return message

        async def send_and_tell(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                _tell(state, sent=not client_left)  # what goes to a client that left is dropped in silence

        try:
            await self._app(scope, receive_and_look, send_and_tell)
        finally:
            _tell(state, sent=False)


def _tell(state: dict[str, Any], *, sent: bool) -> None:
    callbacks: list[Callable[[bool], None]] = state.pop(_WHEN_OVER_KEY, [])
    for callback in callbacks:
        callback(sent)
