"""A request counts from when its bytes reached the machine; data that is not HTTP is refused and counted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from cluster.gateway.http_edge import (
    ArrivalTimes,
    RequestContextMiddleware,
    RequestTimesMiddleware,
    arrival_of,
    call_when_finished,
)
from cluster.gateway.http_protocol import server_config
from cluster.telemetry.metrics import HttpMetrics
from tests.waiting import until

_BUSY_S = 0.4
_TOLERANCE_S = 0.1
"""Tolerance of the kernel's clock, which counts in ticks."""


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def serving(app, observe_refusal=lambda status: None):
    """The address of a server of ``app`` with the protocol."""
    server = Server(server_config(RequestTimesMiddleware(app), observe_refusal))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await task


async def answer_to(address, sent: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Status line, headers and body of what comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    received = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}, body


async def respond_x(scope, receive, send):
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    await PlainTextResponse("x")(scope, receive, send)


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n",
        b"GET /" + b"x" * 100_000,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
    ids=["request line", "host", "header", "length", "too long", "chunk"],
)
async def test_invalid_http_is_refused_and_counted(sent: bytes) -> None:
    observed: list[int] = []
    async with serving(respond_x, observed.append) as address:
        first, headers, body = await answer_to(address, sent)
        assert (await answer_to(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[2] == b"x"
    assert first.startswith(b"HTTP/1.1 400")
    assert headers[b"connection"] == b"close"
    assert b"Invalid HTTP request received." in body
    assert observed == [400]


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_an_invalid_body_disconnects_a_request_that_does_not_read_it(
    method: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler's task exists already, and answers on a connection that is closing; that is no internal error."""
    loop = asyncio.get_running_loop()
    faults: list[object] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    metrics = HttpMetrics(CollectorRegistry())
    async with serving(RequestContextMiddleware(PlainTextResponse("x"), metrics)) as address:
        sent = method + b" / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"
        first, _, _ = await answer_to(address, sent)
        assert (await answer_to(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[2] == b"x"
    assert first.startswith(b"HTTP/1.1 400")
    assert not faults
    assert "a request failed" not in caplog.text


async def test_a_started_response_is_not_followed_by_another() -> None:
    begun = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"be", "more_body": True})
        begun.set()
        await receive()

    async with serving(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.wait_for(begun.wait(), 5)
        writer.write(b"xyz\r\n")
        received = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    assert received.startswith(b"HTTP/1.1 200")
    assert received.endswith(b"\r\n\r\nbe")


async def test_an_upgrade_request_is_answered_without_upgrading() -> None:
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    async with serving(respond_x) as address:
        sent = b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        status, _, body = await answer_to(address, sent)
    assert (status.split()[1], body) == (b"200", b"x")


@pytest.mark.parametrize("is_connected", [True, False], ids=["on an open connection", "not accepted yet"])
async def test_time_in_the_kernel_buffer_counts(is_connected: bool) -> None:
    seen: list[ArrivalTimes] = []

    async def app(scope, receive, send):
        seen.append(arrival_of(Request(scope)))
        await PlainTextResponse("x")(scope, receive, send)

    async with serving(app) as address:
        raw = socket.create_connection(address)
        try:
            if is_connected:
                await asyncio.sleep(0.05)
            before_s = time.monotonic()
            raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            sent_s = time.monotonic()
            time.sleep(_BUSY_S)  # noqa: ASYNC251 - the event loop is busy
            await until(lambda: len(seen) == 1)
        finally:
            raw.close()
    assert before_s - _TOLERANCE_S <= seen[0].received_s <= sent_s + _TOLERANCE_S
    assert seen[0].accepted_s - seen[0].received_s >= _BUSY_S - _TOLERANCE_S


@pytest.mark.parametrize("fails", [False, True])
async def test_the_end_is_reported_once(fails: bool) -> None:
    told: list[bool] = []

    async def app(scope, receive, send):
        call_when_finished(Request(scope), told.append)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        assert told == []
        if fails:
            raise OSError
        await send({"type": "http.response.body", "body": b""})

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        return

    with contextlib.suppress(OSError):
        await RequestTimesMiddleware(app)({"type": "http", "headers": []}, receive, send)
    assert told == [not fails]
