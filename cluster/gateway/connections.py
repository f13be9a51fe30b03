"""How many connections the endpoint accepts, and the answer to those beyond."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import cast

import orjson

from baton.core.errors import ConfigError, EndpointFullError
from cluster.gateway.openai.responses import error_body

NUM_SPARE = 256
"""Connections beyond the limit that may be open at the same time, until they are refused."""
_MAX_CONNECTIONS = 16_384
"""The default limit where the limit of open files allows more. An open connection takes about 20 kB."""
_MIN_OTHER_FILES = 256
_SMALLEST_HEAD = len(b"HEAD /health ")
_HEALTH_REQUESTS = (b"GET /health ", b"HEAD /health ")
_HEAD_TIMEOUT_S = 1.0
_GOODBYE_S = 1.0
_RETRY_AFTER_S = 1.0


def choose_max_connections(configured: int | None, max_files: int) -> int:
    """The limit of HTTP connections of a process that may open ``max_files`` files.

    By default a quarter of the files, and at least 256, are left to Ray and to the connections to workers.

    Raises:
        ConfigError: the process may not open so many files.
    """
    possible = max_files - NUM_SPARE - max(_MIN_OTHER_FILES, max_files // 4)
    if configured is None:
        return max(1, min(_MAX_CONNECTIONS, possible))
    if configured > possible:
        raise ConfigError(
            f"router.max_connections is {configured}, but the router may open {max_files} files, which is enough for "
            f"{max(0, possible)} connections. Raise the hard limit of open files (`ulimit -Hn`), or lower "
            "router.max_connections."
        )
    return configured


def is_health_request(data: bytes) -> bool:
    """Whether the first bytes of a connection ask for ``/health``."""
    return data.startswith(_HEALTH_REQUESTS)


class Refusals:
    """The connections beyond the limit.

    Args:
        observe_refusal: called with the status of each refusal.
    """

    def __init__(self, max_connections: int, observe_refusal: Callable[[int], None]) -> None:
        error = EndpointFullError(
            f"The endpoint has {max_connections} connections, which is its limit (router.max_connections). "
            f"Try again in {_RETRY_AFTER_S:g} s, with fewer connections at the same time.",
            retry_after_s=_RETRY_AFTER_S,
            reason="connections",
        )
        self._answer = _refusal(error)
        self._status = error.http_status
        self._observe_refusal = observe_refusal
        self.answered: dict[RefusedConnection, None] = {}

    def connect(self, on_closed: Callable[[], None]) -> RefusedConnection:
        """The protocol of a new connection. ``on_closed`` is called when it has ended."""
        return RefusedConnection(self, on_closed)

    def answer(self, head: bytes) -> bytes:
        """The answer to a request that begins with ``head``."""
        if is_health_request(head):
            return _response(b"200 OK", {"status": "ok"}, with_body=head.startswith(b"GET"))
        self._observe_refusal(self._status)
        return self._answer

    def make_room(self) -> None:
        """Closes the connections that have been answered, which would otherwise wait for their clients to do so."""
        for connection in list(self.answered):
            connection.close()


class RefusedConnection(asyncio.Protocol):
    """Answers the first request with 503, or with 200 if it asks for ``/health``.

    The rest of the request is read and dropped before the connection is closed, since the kernel discards an answer
    that the client has not read when a connection with unread data is closed.
    """

    def __init__(self, refusals: Refusals, on_closed: Callable[[], None]) -> None:
        self._refusals = refusals
        self._on_closed = on_closed
        self._head = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._set_timer(_HEAD_TIMEOUT_S, self._answer)

    def data_received(self, data: bytes) -> None:
        if self not in self._refusals.answered:
            self._head += data[:_SMALLEST_HEAD]
            if len(self._head) >= _SMALLEST_HEAD:
                self._answer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._refusals.answered.pop(self, None)
        self._on_closed()

    def close(self) -> None:
        self._transport.close()

    def _answer(self) -> None:
        self._refusals.answered[self] = None
        self._transport.write(self._refusals.answer(self._head))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._set_timer(_GOODBYE_S, self._transport.abort)

    def _set_timer(self, seconds: float | None, then: Callable[[], None] = lambda: None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, then)


def _refusal(error: EndpointFullError) -> bytes:
    retry_after = f"Retry-After: {math.ceil(error.retry_after_s)}\r\n".encode()
    return _response(b"503 Service Unavailable", error_body(error), retry_after)


def _response(status: bytes, body: object, more_headers: bytes = b"", *, with_body: bool = True) -> bytes:
    content = orjson.dumps(body)
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%bConnection: close\r\n\r\n%b" % (
        status,
        len(content),
        more_headers,
        content if with_body else b"",
    )
