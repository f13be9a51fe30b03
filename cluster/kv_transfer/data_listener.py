"""A TCP connection beside a transfer's gRPC stream, for its parts: the receiver's end.

One port for all transfers. A connection begins with the ticket that its transfer was given; one that does not, or too
late, is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.kv_transfer.codec import WELCOME
from cluster.kv_transfer.raw_socket import RawSocket
from cluster.wire import kv_pb2

logger = logging.getLogger(__name__)

_TICKET_BYTES = 16
TICKET_TIMEOUT_S = 10.0
"""For a connection to say which transfer it belongs to."""
_MAX_STRANGERS = 64
"""Connections that have not said it yet; more wait to be accepted."""
_BACKLOG = 128
_PAUSE_S = 0.5


class ExpectedConnection:
    """One transfer's connection, which may never come.

    Args:
        offer: what its sender is told.
    """

    def __init__(self, offer: kv_pb2.KVConnection) -> None:
        self.offer = offer
        self._arrival: asyncio.Future[RawSocket] = asyncio.get_running_loop().create_future()

    def arrive(self, connection: RawSocket) -> None:
        """It has come, maybe too late."""
        if self._arrival.done():
            connection.close()
        else:
            self._arrival.set_result(connection)

    async def arrived(self) -> RawSocket:
        """Waits for it; it stays this object's."""
        return await asyncio.shield(self._arrival)

    def close(self) -> None:
        """The transfer is over."""
        if self._arrival.done() and not self._arrival.cancelled():
            self._arrival.result().close()
        self._arrival.cancel()


class DataListener:
    """Listens from :meth:`start` on."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._expected: dict[bytes, ExpectedConnection] = {}
        self._strangers: set[asyncio.Task[None]] = set()

    def start(self, host: str) -> None:
        """
        Args:
            host: address that others reach this one at; any port of it is taken.

        Raises:
            OSError: it is none of this machine's.
        """
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))

    async def stop(self) -> None:
        """Expects nobody any more. Connections that have arrived are their transfers'."""
        tasks = [task for task in (self._accepting, *self._strangers) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:  # a task that never began closes nothing
            self._listener.close()
        self._listener = self._accepting = None

    @contextmanager
    def expect(self, *, wanted: bool) -> Iterator[ExpectedConnection | None]:
        """What one transfer's sender is told, if it wants to be; the connection is closed at the end."""
        if not wanted or self._listener is None:
            yield None
            return
        ticket = os.urandom(_TICKET_BYTES)
        port = self._listener.getsockname()[1]
        expected = self._expected[ticket] = ExpectedConnection(kv_pb2.KVConnection(port=port, ticket=ticket))
        try:
            yield expected
        finally:
            self._expected.pop(ticket, None)
            expected.close()

    async def _accept(self, listener: socket.socket) -> None:
        """Until it is cancelled; whatever else ends it, nobody is sent to a port where nobody answers."""
        try:
            await self._accept_each(listener)
        except Exception:
            logger.exception("no more connections for KV are accepted, it comes in messages")
        finally:
            self._listener = None
            listener.close()

    async def _accept_each(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._strangers) >= _MAX_STRANGERS:
                await asyncio.wait(self._strangers, return_when=asyncio.FIRST_COMPLETED)
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor left, or one that has gone again
                logger.warning("a connection for KV could not be accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            connection.setblocking(False)
            task = asyncio.create_task(self._identify(RawSocket(connection)))
            self._strangers.add(task)
            task.add_done_callback(self._strangers.discard)
            await asyncio.sleep(0)  # whoever has come already introduces itself before the next one is let in

    async def _identify(self, connection: RawSocket) -> None:
        ticket = bytearray(_TICKET_BYTES)
        try:
            async with asyncio.timeout(TICKET_TIMEOUT_S):
                await connection.receive([memoryview(ticket)])
                expected = self._expected.pop(bytes(ticket), None)
                if expected is not None:
                    await connection.send([memoryview(WELCOME)])
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):  # TimeoutError is one
                return
            raise
        if expected is None:
            connection.close()
        else:
            expected.arrive(connection)
