"""A protocol around uvicorn's that records when each request reached this machine."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp

from baton.core.errors import InvalidRequestError
from cluster.gateway.http_edge import RECEIVED_KEY

logger = logging.getLogger(__name__)

_TCP_INFO_BYTES = 56
_LAST_DATA_RECEIVED = struct.Struct("=I")
_LAST_DATA_RECEIVED_OFFSET = 52
"""``tcpi_last_data_recv`` of Linux's ``struct tcp_info``: milliseconds since the last segment with data."""


def server_config(
    app: ASGIApp, observe_refusal: Callable[[int], None], *, shutdown_timeout_s: int | None = None
) -> uvicorn.Config:
    """Configures a server of ``app`` whose connections use :class:`ArrivalProtocol`.

    Args:
        observe_refusal: called with the status of each answer to invalid HTTP/1.1.
        shutdown_timeout_s: time limit of requests that still run when the server stops; ``None`` means no limit.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        log_config=None,
        log_level="error",  # every request that offers an upgrade would log two warnings
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=shutdown_timeout_s,
    )
    config.load()
    protocol = partial(ArrivalProtocol, config.http_protocol_class, observe_refusal)
    config.http_protocol_class = cast("type[asyncio.Protocol]", protocol)
    return config


class ArrivalProtocol(asyncio.Protocol):
    """Records in ``scope["state"]`` when a request arrived, and leaves everything else to uvicorn's own protocol.

    While the event loop is busy, or the connection waits to be accepted, bytes wait in the kernel. The client counts
    that time, so this protocol asks the kernel how long ago they came. If the kernel does not report it, the time of
    reading counts.

    Args:
        inner: makes uvicorn's protocol.
        observe_refusal: called with the status of its answer to invalid HTTP/1.1.
        app_state: uvicorn copies it into the scope of each request.
        arguments: further arguments of ``inner``.
    """

    def __init__(
        self,
        inner: Callable[..., asyncio.Protocol],
        observe_refusal: Callable[[int], None],
        *,
        app_state: dict[str, Any],
        **arguments: Any,
    ) -> None:
        self._state = dict(app_state)  # of this connection
        self._inner = inner(app_state=self._state, **arguments)
        self._observe_refusal = observe_refusal
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._state[RECEIVED_KEY] = time.monotonic() - self._kernel_wait_s()
        was_closing = self._transport.is_closing()
        try:
            self._inner.data_received(data)
        except h11.LocalProtocolError:  # invalid data after the answer has begun
            self._transport.close()
            return
        if self._transport.is_closing() and not was_closing:
            logger.warning("a client sent invalid HTTP/1.1 data; it received an error and was disconnected")
            self._observe_refusal(InvalidRequestError.http_status)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _kernel_wait_s(self) -> float:
        connection = self._transport.get_extra_info("socket")
        if connection is None or not hasattr(socket, "TCP_INFO"):
            return 0.0
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # not TCP, or not supported by the kernel
            return 0.0
        if len(info) < _TCP_INFO_BYTES:
            return 0.0
        waited_ms: int = _LAST_DATA_RECEIVED.unpack_from(info, _LAST_DATA_RECEIVED_OFFSET)[0]
        return waited_ms / 1e3
