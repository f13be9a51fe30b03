"""Responses that are streams of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from baton.core.errors import DeadlineError, RequestCancelledError
from cluster.gateway.answers import Answer
from cluster.gateway.http_edge import to_baton_error, until_disconnect

_LAST_WORDS_S = 5.0
"""Seconds to send the rest after the deadline, so that a client that reads gets the error."""


class PunctualEvents:
    """Events, for the first of which one may wait a limited time.

    Args:
        events: at least one event. It is closed with this object.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self._first = asyncio.ensure_future(anext(events))

    async def wait_for_first(self, timeout_s: float) -> None:
        """Returns when there is an event, or after ``timeout_s``. Closes this object if there is an error or if it is
        cancelled.

        Raises:
            BatonError: what the first event failed with.
        """
        try:
            await asyncio.wait({self._first}, timeout=timeout_s)
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.aclose()
            raise

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield await self._first
        async for event in self._events:
            yield event

    async def aclose(self) -> None:
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._events.aclose()


class SseResponse(Response):
    """Sends each of ``events`` as soon as it is available, and a heartbeat whenever there is none for a while.

    The headers are sent at once, so an error becomes the last event. ``events`` is closed when the client disconnects,
    and also when it does not read before the deadline, which would otherwise hold resources of workers indefinitely.

    Args:
        answer: what ``events`` are of.
        deadline_s: deadline of the request, on the monotonic clock. A send that has not finished by then is given up.
        beat_every_s: seconds of silence after which a heartbeat is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: PunctualEvents, answer: Answer, request_id: str, deadline_s: float, beat_every_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._answer = answer
        self._request_id = request_id
        self._deadline_s = deadline_s
        self._beat_every_s = beat_every_s
        self._sent_s = float("-inf")  # the client may have waited before
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
        heartbeats = asyncio.create_task(self._send_heartbeats(send))
        try:
            async for event in self._events:
                await self._send_body(send, event)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 (the status is sent: an event is the only way to tell the client)
            await self._send_body(send, self._answer.failure(to_baton_error(error, self._request_id)))
        finally:
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_heartbeats(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._sent_s
            if silent_s >= self._beat_every_s:
                await self._send_body(send, self._answer.heartbeat)
            else:
                await asyncio.sleep(self._beat_every_s - silent_s)

    async def _send_body(self, send: Send, body: bytes) -> None:
        self._sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": True})
