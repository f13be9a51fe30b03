"""Server-sent events as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from cluster.http_edge import to_baton_error, until_disconnect
from cluster.openai_api.responses import error_body
from engine.errors import RequestCancelledError

DONE_EVENT = b"data: [DONE]\n\n"


def encode_event(data: Any) -> bytes:
    """One event with ``data`` as JSON."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class SseResponse(Response):
    """Sends ``first`` at once and then ``events``, each as soon as it is there.

    The headers are out by then, so an error becomes an event, and the stream ends without ``[DONE]``. When the client
    goes away, ``events`` is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], request_id: str) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._events = events
        self._request_id = request_id
        # X-Accel-Buffering: nginx would otherwise collect events before it passes them on.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await until_disconnect(receive, self._send_all(send))
            except (RequestCancelledError, OSError):
                # Nobody is left to tell.
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
