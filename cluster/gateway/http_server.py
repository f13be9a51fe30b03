"""The HTTP server: uvicorn with baton's listener and connections."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from cluster.gateway.connections import Refusals
from cluster.gateway.http_edge import MAX_HEAD_BYTES
from cluster.gateway.http_protocol import Edge, EdgeProtocol
from cluster.gateway.listener import Listener


class EdgeServer(uvicorn.Server):
    """Serves an application on one listening socket.

    Args:
        edge: what all connections share.
        max_connections: limit of connections; further ones are answered with 503.
        keep_alive_s: seconds after which an idle connection is closed.
        tls: encrypts the connections; ``None`` serves plain HTTP.
        shutdown_timeout_s: time limit of requests that still run when the server stops; ``None`` means no limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        edge: Edge,
        *,
        max_connections: int,
        keep_alive_s: float = 90.0,
        tls: ssl.SSLContext | None = None,
        shutdown_timeout_s: int | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_config=None,
            log_level="error",  # every request that offers an upgrade would log two warnings
            access_log=False,
            lifespan="off",
            timeout_keep_alive=cast(int, keep_alive_s),  # uvicorn passes it to the event loop, which takes fractions
            timeout_graceful_shutdown=shutdown_timeout_s,
        )
        super().__init__(config)
        self._socket = listener
        self._edge = edge
        self._max_connections = max_connections
        self._tls = tls

    async def run_until_stopped(self) -> None:
        """Serves until ``should_exit`` is set. The socket is closed then."""
        await self.serve(sockets=[self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn."""
        refusals = Refusals(self._max_connections, self._edge.observe_refusal)
        listener = Listener(self._socket, self._max_connections, self._serve_connection, refusals, self._tls)
        listener.start()
        self.servers = [listener]  # type: ignore[list-item]  # uvicorn only closes it and waits for it
        self.started = True

    def _serve_connection(self, on_closed: Callable[[], None]) -> EdgeProtocol:
        return EdgeProtocol(
            self._edge,
            on_closed,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
