"""The HTTP server's protocol: when each request reached this machine, and the answer to what is no HTTP."""

from __future__ import annotations

import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.core.errors import InvalidRequestError
from cluster.gateway.http_edge import REQUEST_ID_HEADER
from cluster.gateway.openai.responses import error_body
from cluster.gateway.request_times import RECEIVED_KEY

_TCP_INFO_BYTES = 56
_LAST_DATA_RECEIVED = struct.Struct("=I")
_LAST_DATA_RECEIVED_OFFSET = 52
"""``tcpi_last_data_recv`` of Linux's ``struct tcp_info``: milliseconds since the last segment with data."""
_MAX_REASON_CHARS = 200


def timed_protocol(observe_fault: Callable[[int], None]) -> type[TimedH11Protocol]:
    """The protocol of a server that hears the status of each answer to what never became a request."""
    return type(TimedH11Protocol.__name__, (TimedH11Protocol,), {"observe_fault": staticmethod(observe_fault)})


class TimedH11Protocol(H11Protocol):
    """Tells the application when a request came, and answers what is no request in the shape of all errors.

    While the event loop is busy, or the connection waits to be accepted, bytes lie in the kernel. The client counts
    that time, so the kernel is asked how long ago they came. Where it does not say, they came when they are read.
    """

    @staticmethod
    def observe_fault(status: int) -> None:
        """What :func:`timed_protocol` was given."""

    def data_received(self, data: bytes) -> None:
        received_s = time.monotonic() - self._kernel_wait_s()
        before = self.scope
        super().data_received(data)
        if self.scope is not before:  # the head of a request was in it; its handler has not run yet
            self.scope["state"][RECEIVED_KEY] = received_s

    def send_400_response(self, msg: str) -> None:
        """Called while h11's error is handled, which says more than ``msg`` and may know a better status."""
        fault = sys.exception()
        reason, status = msg.rstrip("."), InvalidRequestError.http_status
        if isinstance(fault, h11.RemoteProtocolError):
            reason, status = str(fault)[:_MAX_REASON_CHARS], fault.error_status_hint
        try:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._answer_fault(reason, status)
        finally:
            self.transport.close()  # an answer that has begun can only break off

    def _answer_fault(self, reason: str, status: int) -> None:
        is_head = False
        if (
            self.conn.our_state is h11.SEND_RESPONSE and self.cycle is not None
        ):  # the head was fine, what follows is not
            is_head = self.scope["method"] == "HEAD"
            self.cycle.disconnected = True  # its handler, which may not have run yet, talks to nobody
            self.cycle.message_event.set()
        else:
            self.observe_fault(status)  # the application heard nothing of it
        error = InvalidRequestError(f"This is not valid HTTP/1.1 and was not read further: {reason}.")
        body = orjson.dumps(error_body(error))
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            REQUEST_ID_HEADER: f"req-{uuid.uuid4().hex}",
        }
        answer = h11.Response(status_code=status, headers=list(headers.items()))
        for event in (answer, *(() if is_head else (h11.Data(data=body),)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade is an offer, and the request is answered without it: nothing to warn of."""

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
