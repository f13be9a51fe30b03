"""The receiving port of ``sockets.py``: accepts connections, and gives each to the transfer whose ticket it sends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from baton.kv_transfer.codec import TICKET_BYTES, WELCOME, Introduction
from baton.kv_transfer.kv_transfer_config import MAX_CONNECTIONS
from baton.kv_transfer.payload.byte_stream import ByteStream, RawSocket, join
from baton.process.ports import ANY_PORT, PortRange, listen_at
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

TICKET_TIMEOUT_S = 10.0
"""Time limit for a new connection to send its ticket."""
_MAX_UNIDENTIFIED = 64
"""Limit of accepted connections that have not sent their ticket yet; further ones wait to be accepted."""
_BACKLOG = 128
_PAUSE_S = 0.5


class ExpectedConnections:
    """The connections of one transfer, which may never arrive.

    Args:
        offer: what the sender needs to connect.
    """

    def __init__(self, offer: kv_pb2.KVConnection) -> None:
        self.offer = offer
        self._count = 0  # unknown until the first connection introduces itself
        self._arrived: dict[int, RawSocket] = {}
        self._arrival: asyncio.Future[ByteStream] = asyncio.get_running_loop().create_future()

    def takes(self, introduction: Introduction) -> bool:
        """Whether this connection is expected and has not arrived yet."""
        count = self._count or introduction.count
        return (
            not self._arrival.done()
            and introduction.count == count <= self.offer.most
            and introduction.number < count
            and introduction.number not in self._arrived
        )

    def arrive(self, introduction: Introduction, connection: RawSocket) -> None:
        """Takes over a connection, or closes it when it is not expected or no longer expected."""
        if not self.takes(introduction):
            connection.close()
            return
        self._count = introduction.count
        self._arrived[introduction.number] = connection
        if len(self._arrived) == self._count:
            self._arrival.set_result(join([self._arrived[number] for number in range(self._count)]))

    async def arrived(self) -> ByteStream:
        """Waits for all connections. They still belong to this object."""
        return await asyncio.shield(self._arrival)

    def close(self) -> None:
        """Closes all connections and expects no more."""
        for connection in self._arrived.values():
            connection.close()
        self._arrival.cancel()


class DataListener:
    """The port at which the connections of all transfers arrive.

    Args:
        ports: where it may listen.
    """

    def __init__(self, ports: PortRange = ANY_PORT) -> None:
        self._ports = ports
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._expected: dict[bytes, ExpectedConnections] = {}
        self._unidentified: set[asyncio.Task[None]] = set()

    def start(self, host: str) -> None:
        """Begins to listen on a free port.

        Args:
            host: address at which senders reach this machine.

        Raises:
            OSError: this machine does not have the address.
            PortsExhaustedError: no port is free.
        """
        self._listener = self._ports.bind(host, lambda port: listen_at(host, port, _BACKLOG))
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))

    async def stop(self) -> None:
        """Stops listening. Connections that have arrived stay open; they belong to their transfers."""
        tasks = [task for task in (self._accepting, *self._unidentified) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:  # a task that never started has not closed it
            self._listener.close()
        self._listener = self._accepting = None

    @contextmanager
    def expect(self) -> Iterator[ExpectedConnections | None]:
        """Expects one transfer's connections and closes them at the end; ``None`` when this is not listening."""
        if self._listener is None:
            yield None
            return
        ticket = os.urandom(TICKET_BYTES)
        port = self._listener.getsockname()[1]
        offer = kv_pb2.KVConnection(port=port, ticket=ticket, most=MAX_CONNECTIONS)
        expected = self._expected[ticket] = ExpectedConnections(offer)
        try:
            yield expected
        finally:
            self._expected.pop(ticket, None)
            expected.close()

    async def _accept(self, listener: socket.socket) -> None:
        """Runs until it is cancelled. If it ends by an error, the port is no longer offered to senders."""
        try:
            await self._accept_each(listener)
        except Exception:
            logger.exception("KV connections are no longer accepted, so KV is received in messages")
        finally:
            self._listener = None
            listener.close()

    async def _accept_each(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._unidentified) >= _MAX_UNIDENTIFIED:
                await asyncio.wait(self._unidentified, return_when=asyncio.FIRST_COMPLETED)
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no file descriptor left, or the connection is already closed
                logger.warning("a KV connection could not be accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            connection.setblocking(False)
            task = asyncio.create_task(self._identify(RawSocket(connection)))
            self._unidentified.add(task)
            task.add_done_callback(self._unidentified.discard)
            await asyncio.sleep(0)  # lets accepted connections introduce themselves before the next one is accepted

    async def _identify(self, connection: RawSocket) -> None:
        received = bytearray(Introduction.NUM_BYTES)
        try:
            async with asyncio.timeout(TICKET_TIMEOUT_S):
                await connection.receive([memoryview(received)])
                introduction = Introduction.decode(bytes(received))
                expected = self._expected.get(introduction.ticket)
                if expected is None or not expected.takes(introduction):
                    connection.close()
                    return
                await connection.send([memoryview(WELCOME)])
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):  # includes TimeoutError
                return
            raise
        expected.arrive(introduction, connection)
