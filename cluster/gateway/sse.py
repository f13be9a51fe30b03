"""Server-sent events as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from baton.core.errors import DeadlineError, RequestCancelledError
from cluster.gateway.http_edge import to_baton_error, until_disconnect
from cluster.gateway.openai.responses import error_body

DONE_EVENT = b"data: [DONE]\n\n"
_LAST_WORDS_S = 5.0
"""Seconds to send the rest after the deadline, so that a client that reads gets the error."""


def encode_event(data: Any) -> bytes:
    """Encodes one event with ``data`` as JSON."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class SseResponse(Response):
    """Sends ``first`` at once and then each of ``events`` as soon as it is available.

    The headers are sent by then, so an error becomes an event, and the stream ends without ``[DONE]``. ``events`` is
    closed when the client disconnects, and also when it does not read before the deadline, which would otherwise hold
    resources of workers indefinitely.

    Args:
        deadline_s: deadline of the request, on the monotonic clock. A send that has not finished by then is given up.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], request_id: str, deadline_s: float) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._events = events
        self._request_id = request_id
        self._deadline_s = deadline_s
        # X-Accel-Buffering: nginx would otherwise collect events before it passes them on.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(max(_LAST_WORDS_S, self._deadline_s - time.monotonic())):
                    await send(message)
            except TimeoutError:
                scope["state"]["error_code"] = DeadlineError.code  # for metrics and the access log
                raise

        async with aclosing(self._events):
            try:
                await until_disconnect(receive, self._send_all(send_in_time))
            except (RequestCancelledError, OSError):
                # The client left or does not read. The server closes the incomplete response.
                return

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_body(send, self._first)
        try:
            async for event in self._events:
                await _send_body(send, event)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 (the status is sent: an event is the only way to tell the client)
            await _send_body(send, encode_event(error_body(to_baton_error(error, self._request_id))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
