"""TCP connections beside a transfer's gRPC stream, for its parts: the sender's end.

gRPC for Python copies a message three times on its way through one process, which takes half of the processor time of
a hand-off in messages. Here the system reads the bytes where they lie.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

from baton.kv_transfer.codec import WELCOME, Introduction
from baton.kv_transfer.payload.raw_socket import ByteStream, RawSocket
from baton.kv_transfer.payload.striped_socket import join
from baton.rpc.wire import kv_pb2

CONNECT_TIMEOUT_S = 2.0
"""A receiver in reach answers at once; for one behind a firewall the transfer should not wait long."""

SocketOption = tuple[int, int, bytes]
"""Level, name and value."""


async def connect(
    peer: str,
    offered: kv_pb2.KVConnection,
    count: int = 1,
    timeout_s: float = CONNECT_TIMEOUT_S,
    options: Sequence[SocketOption] = (),
) -> ByteStream:
    """Connects to where a receiver waits for a transfer's bytes.

    Args:
        peer: the receiver's gRPC address, ``host:port``.
        count: how many connections the bytes are dealt out to.
        options: set for each of them.

    Raises:
        OSError: nobody answers there that knows the ticket, or not in time, be it to one of the connections alone.
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
        # Who else may have taken the connection does not know this: a proxy, or another program at that port.
        answer = bytearray(len(WELCOME))
        await raw.receive([memoryview(answer)])
        if answer != WELCOME:
            raise ConnectionRefusedError("another program answers there")
    except BaseException:
        connection.close()
        raise
    return raw
