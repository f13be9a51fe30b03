"""The HTTP server of the gateway with any application, and raw requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from cluster.gateway.http_edge import RequestTimesMiddleware
from cluster.gateway.http_protocol import Edge
from cluster.gateway.http_server import EdgeServer
from tests.waiting import TIMEOUT_S, until


class Server(EdgeServer):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def serving(app, *, edge: Edge | None = None, max_connections: int = 1000, **options):
    """The address of a server of ``app``."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        edge = edge or Edge(lambda status: None)
        server = Server(RequestTimesMiddleware(app), listener, edge, max_connections=max_connections, **options)
        task = asyncio.create_task(server.run_until_stopped())
        await until(lambda: server.started)
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await task


async def answer_to(address, sent: bytes, **options) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Status line, headers and body of what comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection(*address, **options)
    writer.write(sent)
    received = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}, body
