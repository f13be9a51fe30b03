"""TCP connections beside a transfer's gRPC stream, for its parts: the receiver's end.

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

from baton.kv_transfer.codec import TICKET_BYTES, WELCOME, Introduction
from baton.kv_transfer.kv_transfer_config import MOST_CONNECTIONS
from baton.kv_transfer.payload.raw_socket import ByteStream, RawSocket
from baton.kv_transfer.payload.striped_socket import join
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

TICKET_TIMEOUT_S = 10.0
"""For a connection to say which transfer it belongs to."""
_MAX_STRANGERS = 64
"""Connections that have not said it yet, of all transfers; more wait to be accepted."""
_BACKLOG = 128
_PAUSE_S = 0.5


class ExpectedConnections:
    """Those of one transfer, which may never come.

    Args:
        offer: what its sender is told.
    """

    def __init__(self, offer: kv_pb2.KVConnection) -> None:
        self.offer = offer
        self._count = 0  # until the first one says it
        self._arrived: dict[int, RawSocket] = {}
        self._arrival: asyncio.Future[ByteStream] = asyncio.get_running_loop().create_future()

    def takes(self, introduction: Introduction) -> bool:
        """Whether it is one of those that are still to come."""
        count = self._count or introduction.count
        return (
            not self._arrival.done()
            and introduction.count == count <= self.offer.most
            and introduction.number < count
            and introduction.number not in self._arrived
        )

    def arrive(self, introduction: Introduction, connection: RawSocket) -> None:
        """One has come; it belongs to this object, or is closed when that does not take it (any more)."""
        if not self.takes(introduction):
            connection.close()
            return
        self._count = introduction.count
        self._arrived[introduction.number] = connection
        if len(self._arrived) == self._count:
            self._arrival.set_result(join([self._arrived[number] for number in range(self._count)]))

    async def arrived(self) -> ByteStream:
        """Waits for all of them; they stay this object's."""
        return await asyncio.shield(self._arrival)

    def close(self) -> None:
        """The transfer is over."""
        for connection in self._arrived.values():
            connection.close()
        self._arrival.cancel()


class DataListener:
    """Listens from :meth:`start` on."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._expected: dict[bytes, ExpectedConnections] = {}
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
    def expect(self, *, wanted: bool) -> Iterator[ExpectedConnections | None]:
        """What one transfer's sender is told, if it wants to be; the connections are closed at the end."""
        if not wanted or self._listener is None:
            yield None
            return
        ticket = os.urandom(TICKET_BYTES)
        port = self._listener.getsockname()[1]
        offer = kv_pb2.KVConnection(port=port, ticket=ticket, most=MOST_CONNECTIONS)
        expected = self._expected[ticket] = ExpectedConnections(offer)
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
        said = bytearray(Introduction.NUM_BYTES)
        try:
            async with asyncio.timeout(TICKET_TIMEOUT_S):
                await connection.receive([memoryview(said)])
                introduction = Introduction.decode(bytes(said))
                expected = self._expected.get(introduction.ticket)
                if expected is None or not expected.takes(introduction):
                    connection.close()
                    return
                await connection.send([memoryview(WELCOME)])
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):  # TimeoutError is one
                return
            raise
        expected.arrive(introduction, connection)
