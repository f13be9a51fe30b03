"""A TCP connection beside a transfer's gRPC stream, for its parts: the sender's end.

gRPC for Python copies a message three times on its way through one process, which takes half of the processor time of
a hand-off in messages. Here the system reads the bytes where they lie.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from cluster.kv_transfer.codec import WELCOME
from cluster.kv_transfer.raw_socket import RawSocket
from cluster.wire import kv_pb2

CONNECT_TIMEOUT_S = 2.0
"""A receiver in reach answers at once; for one behind a firewall the transfer should not wait long."""


async def connect(peer: str, offered: kv_pb2.KVConnection, timeout_s: float = CONNECT_TIMEOUT_S) -> RawSocket:
    """Connects to where a receiver waits for a transfer's bytes.

    Args:
        peer: the receiver's gRPC address, ``host:port``.

    Raises:
        OSError: nobody answers there that knows the ticket, or not in time.
    """
    loop = asyncio.get_running_loop()
    host = peer.rpartition(":")[0].strip("[]")
    async with asyncio.timeout(timeout_s):
        found = await loop.getaddrinfo(host, offered.port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(found, 1):
            try:
                return await _introduce(socket.socket(family, kind, protocol), address, offered.ticket)
            except OSError:
                if number == len(found):
                    raise
    raise OSError(f"{host} has no address")


async def _introduce(connection: socket.socket, address: Any, ticket: bytes) -> RawSocket:
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, address)
        raw = RawSocket(connection)
        await raw.send([memoryview(ticket)])
        # Who else may have taken the connection does not know this: a proxy, or another program at that port.
        answer = bytearray(len(WELCOME))
        await raw.receive([memoryview(answer)])
        if answer != WELCOME:
            raise ConnectionRefusedError("another program answers there")
    except BaseException:
        connection.close()
        raise
    return raw
