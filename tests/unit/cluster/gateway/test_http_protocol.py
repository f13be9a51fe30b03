"""A request counts from when its bytes reached the machine, not from when somebody had time to read them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from cluster.gateway.http_protocol import timed_protocol
from cluster.gateway.request_times import ArrivalTimes, RequestTimesMiddleware, arrival_of, call_when_over
from tests.unit.cluster.fakes import eventually

_BUSY_S = 0.4
_TOLERANCE_S = 0.1
"""Of the kernel's own clock, which counts in ticks."""


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def serving(app, observe_fault=lambda status: None):
    """The address of a server of ``app`` with the protocol."""
    config = uvicorn.Config(
        RequestTimesMiddleware(app),
        host="127.0.0.1",
        port=0,
        lifespan="off",
        http=timed_protocol(observe_fault),
        ws="none",
        log_level="error",
    )
    server = Server(config)
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()
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


async def say_x(scope, receive, send):
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    await PlainTextResponse("x")(scope, receive, send)


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"hello\r\n\r\n", b"400 Bad Request", "illegal request line"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400 Bad Request", "Missing mandatory Host: header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", b"400 Bad Request", "illegal header line"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n", b"400 Bad Request", "Content-Length"),
        (b"GET /" + b"x" * 100_000, b"431 Request Header Fields Too Large", "too long"),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            b"400 Bad Request",
            "illegal chunk header",
        ),
    ],
    ids=["request line", "host", "header", "length", "too long", "chunk"],
)
async def test_what_is_no_http_is_answered_like_every_other_error(sent: bytes, status: bytes, reason: str) -> None:
    observed: list[int] = []
    async with serving(say_x, observed.append) as address:
        first, headers, body = await answer_to(address, sent)
        assert (await answer_to(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[2] == b"x"
    assert first.startswith(b"HTTP/1.1 " + status[:3])
    # The application books a request whose head was one itself.
    assert observed == ([] if b"chunked" in sent else [int(status[:3])])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"connection"] == b"close"
    assert headers[b"x-request-id"].startswith(b"req-")
    error = json.loads(body)["error"]
    assert reason in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": None, "code": "invalid_request"}


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_a_body_that_is_none_silences_a_handler_that_has_not_read_it(method: bytes) -> None:
    """The handler's task is there already, and would answer on a connection that is closing."""
    faults = []

    async def app(scope, receive, send):
        try:
            await PlainTextResponse("x")(scope, receive, send)
        except Exception as error:  # whatever it is
            faults.append(error)
            raise

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    async with serving(app) as address:
        sent = method + b" / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"
        first, headers, body = await answer_to(address, sent)
        assert (await answer_to(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[2] == b"x"
    assert first.startswith(b"HTTP/1.1 400")
    assert int(headers[b"content-length"]) > 100
    assert bool(body) == (method == b"GET")
    assert not faults


async def test_a_response_that_has_begun_is_not_followed_by_another() -> None:
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


async def test_an_upgrade_is_answered_as_the_request_it_is() -> None:
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    async with serving(say_x) as address:
        sent = b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        status, _, body = await answer_to(address, sent)
    assert (status.split()[1], body) == (b"200", b"x")


@pytest.mark.parametrize("is_connected", [True, False], ids=["on an open connection", "not accepted yet"])
async def test_time_in_the_kernel_counts(is_connected: bool) -> None:
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
            await eventually(lambda: len(seen) == 1)
        finally:
            raw.close()
    assert before_s - _TOLERANCE_S <= seen[0].received_s <= sent_s + _TOLERANCE_S
    assert seen[0].accepted_s - seen[0].received_s >= _BUSY_S - _TOLERANCE_S


@pytest.mark.parametrize("fails", [False, True])
async def test_the_end_is_told_once(fails: bool) -> None:
    told: list[bool] = []

    async def app(scope, receive, send):
        call_when_over(Request(scope), told.append)
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
