"""Parts in TCP connections next to a transfer's gRPC stream, for receivers on other hosts.

gRPC for Python copies a message three times within each process, which takes half of the CPU time of a hand-off in
messages. Here the system reads and writes the bytes in place (``byte_stream.py``).

A receiver has one port for all transfers and gives each transfer a ticket. A connection that does not send a known
ticket in time is closed. A sender that cannot connect sends its parts in messages and tries again a minute later.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from baton.core.errors import TransferError
from baton.kv_transfer.base import PartBuffer, Payload, Pieces
from baton.kv_transfer.codec import HEAD_LENGTH_BYTES, WELCOME, Introduction, decode_head, encode_head
from baton.kv_transfer.payload.base import PartIntake, PartReceiver, ReceivePath, SendPath, Write
from baton.kv_transfer.payload.byte_stream import ByteStream, NothingCameError, RawSocket, join
from baton.kv_transfer.payload.inline import InlineReceiver, InlineSender
from baton.kv_transfer.payload.socket_listener import DataListener, ExpectedConnections
from baton.kv_transfer.peer_channels import PeerChannel
from baton.process.ports import ANY_PORT, PortRange
from baton.rpc.channel import MAX_MESSAGE_BYTES
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

BYTES_PER_CONNECTION = 32 * 1024 * 1024
"""Bytes of native KV per connection of a transfer. Each connection costs a round trip at the start."""
CONNECT_TIMEOUT_S = 2.0
"""A reachable receiver answers at once. A transfer should not wait long for one behind a firewall."""
RETRY_S = 60.0
"""How long an unreachable peer is avoided. The cause may have been temporary."""
_MAX_HEAD_BYTES = 4096

SocketOption = tuple[int, int, bytes]
"""The arguments of ``setsockopt``: level, name and value."""


class SocketSender(InlineSender):
    """Sends parts through connections, and empty parts in their messages.

    Args:
        avoid: called with the error when the connections break or stall.
    """

    def __init__(
        self, connection: ByteStream, num_connections: int, write: Write, avoid: Callable[[OSError], None]
    ) -> None:
        super().__init__(write)
        self.connection = connection
        self.num_connections = num_connections
        self._avoid = avoid

    async def send(self, part: kv_pb2.KVPart, payload: Payload | Pieces | PartBuffer) -> None:
        if not isinstance(payload, Payload | Pieces) or not len(payload):
            await super().send(part, payload)
            return
        part.num_bytes = len(payload)
        views = payload.views if isinstance(payload, Pieces) else (memoryview(payload),)
        await self.connection.send([memoryview(encode_head(part)), *views])

    def close(self, cause: OSError | None = None) -> None:
        self.connection.close()
        if cause is not None:
            self._avoid(cause)


class SocketSendPath(SendPath):
    """Connects to receivers that listen.

    Args:
        connections: maximum number of connections of a transfer.
        bytes_per_connection: bytes of native KV for each of a transfer's connections.
        options: set for every connection.
    """

    def __init__(
        self,
        connections: int,
        *,
        bytes_per_connection: int = BYTES_PER_CONNECTION,
        options: Sequence[SocketOption] = (),
    ) -> None:
        self._connections = connections
        self._bytes_per_connection = bytes_per_connection
        self._options = options
        self._avoided_until_s: WeakKeyDictionary[PeerChannel, float] = WeakKeyDictionary()

    def offer(self, peer: PeerChannel, reserve: kv_pb2.KVReserve) -> None:
        reserve.connects = time.monotonic() >= self._avoided_until_s.get(peer, 0.0)

    async def open(
        self, peer: PeerChannel, reserved: kv_pb2.KVReserved, num_bytes: int, write: Write
    ) -> SocketSender | None:
        if not reserved.connection.most:
            return None
        wanted = max(1, min(self._connections, num_bytes // self._bytes_per_connection))
        count = min(wanted, reserved.connection.most)
        try:
            connection = await connect(peer.peer, reserved.connection, count, options=self._options)
        except OSError as error:
            self._avoid(peer, error)
            return None
        return SocketSender(connection, count, write, partial(self._avoid, peer))

    def _avoid(self, peer: PeerChannel, error: OSError) -> None:
        self._avoided_until_s[peer] = time.monotonic() + RETRY_S
        logger.warning(
            "no direct connection to the worker at %s, so KV is sent to it in gRPC messages for %.0f s, which costs "
            "more CPU time (kv_transfer.connections): %s %s",
            peer.peer,
            RETRY_S,
            type(error).__name__,
            error,
        )


async def connect(
    peer: str,
    offered: kv_pb2.KVConnection,
    count: int = 1,
    timeout_s: float = CONNECT_TIMEOUT_S,
    options: Sequence[SocketOption] = (),
) -> ByteStream:
    """Opens the connections of a transfer to a receiver.

    Args:
        peer: the receiver's gRPC address, ``host:port``.
        count: number of connections.
        options: set for each connection.

    Raises:
        OSError: a connection failed, timed out, or was not answered by a program that knows the ticket.
    """
    host = peer.rpartition(":")[0].strip("[]")
    tasks = [
        asyncio.ensure_future(_connect(host, offered.port, Introduction(offered.ticket, number, count), options))
        for number in range(count)
    ]
    try:
        async with asyncio.timeout(timeout_s):
            return join(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for made in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(made, RawSocket):
                made.close()
        raise


async def _connect(host: str, port: int, introduction: Introduction, options: Sequence[SocketOption]) -> RawSocket:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, address) in enumerate(found, 1):
        try:
            return await _introduce(socket.socket(family, kind, protocol), address, introduction, options)
        except OSError:
            if number == len(found):
                raise
    raise OSError(f"{host} has no address")


async def _introduce(
    connection: socket.socket, address: Any, introduction: Introduction, options: Sequence[SocketOption]
) -> RawSocket:
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in options:
            connection.setsockopt(*option)
        await asyncio.get_running_loop().sock_connect(connection, address)
        raw = RawSocket(connection)
        await raw.send([memoryview(introduction.encode())])
        # Only the receiver sends this answer; a proxy or another program at that port does not.
        answer = bytearray(len(WELCOME))
        await raw.receive([memoryview(answer)])
        if answer != WELCOME:
            raise ConnectionRefusedError("another program answered at this port")
    except BaseException:
        connection.close()
        raise
    return raw


class SocketReceiver(InlineReceiver):
    """Takes in parts from connections once all connections have arrived, and from messages."""

    def __init__(self, intake: PartIntake, expected: ExpectedConnections) -> None:
        super().__init__(intake)
        self.reading = self._task = asyncio.create_task(self._read(expected))

    async def close(self) -> None:
        """Stops reading."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self, expected: ExpectedConnections) -> None:
        connection = await expected.arrived()
        has_begun = False
        try:
            while True:
                await self._take_part(connection)
                has_begun = True
        except OSError as error:
            if isinstance(error, NothingCameError) and not has_begun:
                return  # the sender gave up just before it was welcomed, and sends messages instead
            raise TransferError(f"the sender's connection ended before everything was sent: {error}.") from error

    async def _take_part(self, connection: ByteStream) -> None:
        """Receives one part. Raises BatonError if it is not as agreed, and OSError when the connection has ended."""
        part = await _next_head(connection)
        if not 0 < part.num_bytes <= MAX_MESSAGE_BYTES:
            raise TransferError(f"a KV part has {part.num_bytes} bytes, but must have 1 to {MAX_MESSAGE_BYTES}.")
        await self._intake.fill(part, part.num_bytes, connection.receive)


class SocketReceivePath(ReceivePath):
    """Listens for the connections of all transfers.

    Args:
        ports: where it may listen.
    """

    def __init__(self, ports: PortRange = ANY_PORT) -> None:
        self._listener = DataListener(ports)

    def start(self, host: str) -> None:
        try:
            self._listener.start(host)
        except OSError as error:
            logger.warning(
                "cannot listen for KV connections at %s, so KV is received in messages (kv_transfer.connections): %s",
                host,
                error,
            )

    @asynccontextmanager
    async def accept(
        self, reserve: kv_pb2.KVReserve, reserved: kv_pb2.KVReserved, intake: PartIntake
    ) -> AsyncIterator[PartReceiver | None]:
        if not reserve.connects:
            yield None
            return
        with self._listener.expect() as expected:
            if expected is None:
                yield None
                return
            reserved.connection.CopyFrom(expected.offer)
            parts = SocketReceiver(intake, expected)
            try:
                yield parts
            finally:
                await parts.close()

    async def close(self) -> None:
        await self._listener.stop()


async def _next_head(connection: ByteStream) -> kv_pb2.KVPart:
    length = bytearray(HEAD_LENGTH_BYTES)
    await connection.receive([memoryview(length)])
    num_bytes = int.from_bytes(length, "little")
    if num_bytes > _MAX_HEAD_BYTES:
        raise TransferError(f"a KV part's header has {num_bytes} bytes; the sender uses a different protocol.")
    head = bytearray(num_bytes)
    await connection.receive([memoryview(head)])
    return decode_head(bytes(head))
