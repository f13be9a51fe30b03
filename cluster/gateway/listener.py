"""Accepts connections. uvloop's own server closes those that it has no file descriptor for, without an answer."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.core.logs import OccasionalLog
from baton.process.background import BackgroundTasks
from cluster.gateway.connections import NUM_SPARE, Refusals

logger = logging.getLogger(__name__)

_ACCEPTED_PER_PASS = 1024
_RETRY_S = 0.5
_HANDSHAKE_TIMEOUT_S = 10.0

MakeProtocol = Callable[[Callable[[], None]], asyncio.Protocol]
"""Makes the protocol of a connection, which calls its argument when the connection has ended."""


class Listener:
    """Accepts on one socket: connections up to a limit, :data:`NUM_SPARE` more to refuse them, and then none.

    Others wait in the kernel until one of the open connections has ended. The same happens when the process or the
    machine has no more file descriptors.

    Args:
        max_connections: limit of the connections that ``serve`` makes.
        refusals: make the other connections.
        tls: encrypts the connections; ``None`` leaves them plain.
    """

    def __init__(
        self,
        listener: socket.socket,
        max_connections: int,
        serve: MakeProtocol,
        refusals: Refusals,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._socket = listener
        self._loop = asyncio.get_running_loop()
        self._kinds = (_Kind(serve, max_connections), _Kind(refusals.connect, NUM_SPARE))
        self._refusals = refusals
        self._tls = tls
        self._tasks = BackgroundTasks()
        self._log = OccasionalLog(logger)
        self._is_accepting = False
        self._is_closed = False

    def start(self) -> None:
        """Begins to listen and to accept."""
        self._socket.listen(socket.SOMAXCONN)
        self._socket.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stops accepting. Open connections remain."""
        self._is_closed = True
        self._pause()

    async def wait_closed(self) -> None:
        """Returns at once, since uvicorn has waited for the open connections already."""

    def _resume(self) -> None:
        if not self._is_accepting and not self._is_closed:
            self._is_accepting = True
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _pause(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._socket.fileno())

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_PER_PASS):
            kind = next((kind for kind in self._kinds if len(kind.open) < kind.limit), None)
            if kind is None:
                self._pause()  # until a connection ends
                self._refusals.make_room()
                return
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor or no memory is left
                self._log.log(logging.ERROR, f"no connection can be accepted ({error.strerror}); trying again")
                self._pause()
                self._loop.call_later(_RETRY_S, self._resume)
                return
            connection.setblocking(False)
            kind.open.add(connection)
            self._tasks.spawn(self._begin(connection, kind))

    async def _begin(self, connection: socket.socket, kind: _Kind) -> None:
        on_closed = partial(self._end, connection, kind)
        timeout_s = None if self._tls is None else _HANDSHAKE_TIMEOUT_S
        try:
            await self._loop.connect_accepted_socket(
                partial(kind.make_protocol, on_closed), connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:  # the client has left, or does not speak TLS
            logger.debug("a connection ended before its first request: %s", error)
            connection.close()
            on_closed()

    def _end(self, connection: socket.socket, kind: _Kind) -> None:
        kind.open.discard(connection)
        self._resume()


@dataclass(frozen=True, slots=True)
class _Kind:
    """The connections that are served, or those that are refused."""

    make_protocol: MakeProtocol
    limit: int
    open: set[socket.socket] = field(default_factory=set)
