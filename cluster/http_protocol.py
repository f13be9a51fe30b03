"""The HTTP server's protocol, with the moment at which each request reached this machine."""

from __future__ import annotations

import socket
import struct
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

from cluster.request_times import RECEIVED_KEY

_TCP_INFO_BYTES = 56
_LAST_DATA_RECEIVED = struct.Struct("=I")
_LAST_DATA_RECEIVED_OFFSET = 52
"""``tcpi_last_data_recv`` of Linux's ``struct tcp_info``: milliseconds since the last segment with data."""


class TimedH11Protocol(H11Protocol):
    """Tells the application when a request came.

    While the event loop is busy, or the connection waits to be accepted, bytes lie in the kernel. The client counts
    that time, so the kernel is asked how long ago they came. Where it does not say, they came when they are read.
    """

    def data_received(self, data: bytes) -> None:
        received_s = time.monotonic() - self._kernel_wait_s()
        before = self.scope
        super().data_received(data)
        if self.scope is not before:  # the head of a request was in it; its handler has not run yet
            self.scope["state"][RECEIVED_KEY] = received_s

    def _kernel_wait_s(self) -> float:
        connection = self.transport.get_extra_info("socket")
        if connection is None or not hasattr(socket, "TCP_INFO"):
            return 0.0
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # not TCP, or a kernel that does not tell
            return 0.0
        if len(info) < _TCP_INFO_BYTES:
            return 0.0
        waited_ms: int = _LAST_DATA_RECEIVED.unpack_from(info, _LAST_DATA_RECEIVED_OFFSET)[0]
        return waited_ms / 1e3
