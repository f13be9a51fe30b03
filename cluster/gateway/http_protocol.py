"""A served connection: uvicorn's protocol with time limits, typed errors, turns, and the time at which data arrived."""

from __future__ import annotations

import asyncio
import http
import logging
import math
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.core.errors import BatonError, EndpointFullError, InvalidRequestError, SlowRequestError
from baton.core.logs import OccasionalLog
from cluster.gateway.connections import is_health_request
from cluster.gateway.http_edge import MAX_HEAD_BYTES, RECEIVED_KEY
from cluster.gateway.openai.responses import error_body
from cluster.gateway.turns import ByteBudget, Turns

logger = logging.getLogger(__name__)

_TCP_INFO_BYTES = 56
_LAST_DATA_RECEIVED = struct.Struct("=I")
_LAST_DATA_RECEIVED_OFFSET = 52
"""``tcpi_last_data_recv`` of Linux's ``struct tcp_info``: milliseconds since the last segment with data."""
_MAX_WAITING_BYTES = 64 * 2**20
_MAX_REASON_CHARS = 200
_FLUSH_TIMEOUT_S = 10.0
"""Seconds in which a client must read the end of its last answer."""


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """How long a client may take to send a request.

    Attributes:
        head_s: seconds until the head is complete, from the connection's begin, or from its first byte on a connection
            that was idle.
        body_s: seconds for the body in addition to ``body_bytes_per_s``.
        body_bytes_per_s: lowest mean rate of the body.
    """

    head_s: float = 10.0
    body_s: float = 10.0
    body_bytes_per_s: float = 16 * 1024

    def of_body(self, num_bytes: int) -> float:
        """Seconds after which more than ``num_bytes`` of a body must have arrived."""
        return self.body_s + num_bytes / self.body_bytes_per_s


@dataclass(frozen=True, slots=True)
class Edge:
    """What all connections share.

    Attributes:
        observe_refusal: called with the status of each answer that the application does not give.
        waiting_bytes: bounds what has arrived of requests that wait for their turn.
    """

    observe_refusal: Callable[[int], None]
    limits: ReceiveLimits = ReceiveLimits()
    turns: Turns = field(default_factory=Turns)
    waiting_bytes: ByteBudget = field(default_factory=lambda: ByteBudget(_MAX_WAITING_BYTES))
    log: OccasionalLog = field(default_factory=lambda: OccasionalLog(logger))


class EdgeProtocol(H11Protocol):
    """Adds to uvicorn's protocol what a public endpoint needs.

    While the event loop is busy, or the connection waits to be accepted, bytes wait in the kernel. The client counts
    that time, so this protocol asks the kernel how long ago they came, and records it in ``scope["state"]``. If the
    kernel does not report it, the time of reading counts.

    Args:
        on_closed: called when the connection has ended.
        arguments: arguments of uvicorn's protocol.
    """

    def __init__(self, edge: Edge, on_closed: Callable[[], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.app_state = dict(self.app_state)  # of this connection
        self._edge = edge
        self._on_closed = on_closed
        self._timer: asyncio.TimerHandle | None = None
        self._part: object = None
        self._part_began_s = 0.0
        self._part_bytes = 0
        self._waits_for_turn = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(0)

    def data_received(self, data: bytes) -> None:
        self.app_state[RECEIVED_KEY] = time.monotonic() - self._kernel_wait_s()
        if self.conn.their_state is not h11.IDLE or is_health_request(data):
            self._process(data)
            return
        if not self._edge.waiting_bytes.take(len(data)):
            text = "Too many requests arrive at once. Try again in a second."
            self._refuse(EndpointFullError(text, reason="bytes"))
            return
        self._waits_for_turn = True
        self.flow.pause_reading()
        self._edge.turns.take(lambda: self._take_turn(data))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn does not after an error
        self._set_timer(None)
        self._on_closed()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit_goodbye()
        else:
            self._watch(0)

    def send_400_response(self, msg: str) -> None:
        """Answers data that is not valid HTTP/1.1, with the parser's reason. uvicorn calls it while it handles the
        parser's error."""
        if reason := str(sys.exception() or ""):
            msg = f"Invalid HTTP request: {reason[:_MAX_REASON_CHARS]}."
        self._edge.log.log(logging.WARNING, "a client sent invalid HTTP/1.1 data and was disconnected")
        self._refuse(InvalidRequestError(f"{msg} Send HTTP/1.1 with a head of at most {MAX_HEAD_BYTES // 1024} KiB."))

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client does not read its last answer
        else:
            super().timeout_keep_alive_handler()

    def _take_turn(self, data: bytes) -> None:
        self._waits_for_turn = False
        self._edge.waiting_bytes.give_back(len(data))
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._process(data)

    def _process(self, data: bytes) -> None:
        super().data_received(data)
        if not self.transport.is_closing():
            self._watch(len(data))

    def _watch(self, num_bytes: int) -> None:
        """Starts or ends the time limit for the part of a request that the client is sending.

        Args:
            num_bytes: number of bytes that have just arrived.
        """
        part = self._part_in_progress()
        if part == self._part:
            self._part_bytes += num_bytes
            return
        self._part, self._part_began_s, self._part_bytes = part, self.loop.time(), 0
        self._set_timer(None if part is None else self._time_limit_s())

    def _part_in_progress(self) -> tuple[str, object] | None:
        """The kind of the part and the request before or at it; ``None`` if the client need not send anything."""
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            return "head", self.cycle
        return None

    def _time_limit_s(self) -> float:
        limits = self._edge.limits
        return limits.head_s if self.conn.their_state is h11.IDLE else limits.of_body(self._part_bytes)

    def _check_time(self) -> None:
        left_s = self._part_began_s + self._time_limit_s() - self.loop.time()
        if self._waits_for_turn or left_s > 0:
            self._set_timer(max(left_s, 1.0))
            return
        if self.cycle is None and not self.conn.trailing_data[0]:
            self.transport.close()  # nothing has been sent, so there is nothing to answer
            return
        limits = self._edge.limits
        self._refuse(
            SlowRequestError(
                f"The request was not complete in time. Send the head within {limits.head_s:g} s, and the body within "
                f"{limits.body_s:g} s or at {limits.body_bytes_per_s / 1024:g} KiB/s."
            )
        )

    def _refuse(self, error: BatonError) -> None:
        """Sends an error unless an answer has begun, and closes the connection."""
        body = orjson.dumps(error_body(error))
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        if isinstance(error, EndpointFullError):
            headers.append(("Retry-After", str(math.ceil(error.retry_after_s))))
        reason = http.HTTPStatus(error.http_status).phrase
        start = h11.Response(status_code=error.http_status, headers=headers, reason=reason)
        try:
            for event in (start, h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self._edge.observe_refusal(error.http_status)
        except h11.LocalProtocolError:
            logger.debug("an answer had begun when its request turned out to be invalid")
        self.transport.close()
        self._limit_goodbye()

    def _limit_goodbye(self) -> None:
        self._set_timer(None)
        self._timer = self.loop.call_later(_FLUSH_TIMEOUT_S, self.transport.abort)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._check_time)

    def _kernel_wait_s(self) -> float:
        connection = self.transport.get_extra_info("socket")
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
