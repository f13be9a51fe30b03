"""Request bodies: read within bounds of size and memory, or dropped."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request

from baton.core.errors import BatonError, EndpointFullError, RequestTooLargeError
from cluster.gateway.http_edge import add_response_headers
from cluster.gateway.openai.json_body import JsonLimits, check_content_headers, parse_object
from cluster.gateway.turns import ByteBudget
from cluster.gateway.work_threads import WorkThreads

# A client that is cut off while it sends may not read the answer, so up to this much of a refused body is drained.
_MAX_DRAINED_BYTES = 64 * 2**20
_LONGEST_PAUSE_S = 2.0
_MAX_INLINE_BYTES = 16 * 1024
"""Larger bodies are parsed one by one in a thread. The parser keeps the interpreter's lock, and the event loop could
wait for each of several parsers in turn."""
_BODIES_AT_ONCE = 16
"""Bodies of the largest size that may be in memory at the same time; more smaller ones."""


def announced_bytes(request: Request) -> int:
    """The length of the body according to the request's head; 0 if it does not say."""
    return int(request.headers.get("content-length", 0))


async def drop_body(request: Request, max_bytes: int = _MAX_DRAINED_BYTES) -> None:
    """Reads and drops the body of a refused request, so that its client reads the answer.

    A client that has asked whether to send the body (``Expect: 100-continue``) reads the answer instead of sending it.
    """
    if request.headers.get("expect", "").lower() == "100-continue":
        add_response_headers(request, {"Connection": "close"})
        return
    await drop_rest(request, max_bytes)


async def drop_rest(request: Request, max_bytes: int) -> None:
    """Like :func:`drop_body`, when some of the body may have been read. A client that pauses gets its answer then."""
    num_bytes, stream = 0, request.stream()
    try:
        while num_bytes <= max_bytes:
            async with asyncio.timeout(_LONGEST_PAUSE_S):
                chunk = await anext(stream, None)
            if chunk is None:
                return
            num_bytes += len(chunk)
            await asyncio.sleep(0)
    except TimeoutError:
        add_response_headers(request, {"Connection": "close"})
    except RuntimeError:  # all of it was read
        return


class BodyReader:
    """Reads the JSON bodies of requests.

    Args:
        max_bytes: size of the largest body. Unfinished bodies together may take 16 times as much memory.
        limits: how much a body may hold.
    """

    def __init__(self, max_bytes: int, limits: JsonLimits | None = None) -> None:
        self._max_bytes = max_bytes
        self._thread = WorkThreads(1)
        self._limits = limits or JsonLimits()
        self._budget = ByteBudget(_BODIES_AT_ONCE * max_bytes)

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The JSON object in the request's body.

        Raises:
            RequestTooLargeError: the body is too long.
            EndpointFullError: too many bytes of other bodies are in memory.
            InvalidRequestError: it is not a JSON object.
        """
        try:
            check_content_headers(request.headers.get("content-type"), request.headers.get("content-encoding"))
            if (problem := self._problem(announced_bytes(request))) is not None:
                raise problem
        except BatonError:
            await drop_body(request)
            raise
        chunks: list[bytes] = []
        num_bytes = 0
        with self._budget.share() as share:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                problem = problem or self._problem(num_bytes, share.grow(len(chunk)))
                if problem is None:
                    chunks.append(chunk)
                    continue
                chunks.clear()
                share.release()
                if num_bytes > self._max_bytes + _MAX_DRAINED_BYTES:
                    break
            if problem is not None:
                raise problem
            if num_bytes <= _MAX_INLINE_BYTES:
                return parse_object(b"".join(chunks), self._limits)
            # Joining several megabytes takes milliseconds, too, without the interpreter's lock.
            return await self._thread.run(num_bytes, lambda: parse_object(b"".join(chunks), self._limits))

    def _problem(self, num_bytes: int, has_room: bool = True) -> BatonError | None:
        if num_bytes > self._max_bytes:
            return RequestTooLargeError(
                f"The request body is larger than the limit of {self._max_bytes} bytes. Send a smaller request."
            )
        if not has_room:
            return EndpointFullError(
                f"The bodies of requests that are not complete take {self._budget.max_bytes} bytes, which is the limit "
                "for all clients together. Try again in a second.",
                reason="bytes",
            )
        return None
