"""A request counts from when its bytes reached the machine; data that is not HTTP is refused and counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time

import pytest
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
from cluster.gateway.http_protocol import Edge, ReceiveLimits
from cluster.gateway.turns import ByteBudget, Turns
from cluster.telemetry.metrics import HttpMetrics
from tests.unit.cluster.gateway.edge_serving import answer_to, serving
from tests.waiting import TIMEOUT_S, until

_BUSY_S = 0.4
_TOLERANCE_S = 0.1
"""Tolerance of the kernel's clock, which counts in ticks."""


async def respond_x(scope, receive, send):
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    await PlainTextResponse("x")(scope, receive, send)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"hello\r\n\r\n", "illegal request line"),
        (b"GET / HTTP/1.1\r\n\r\n", "Missing mandatory Host: header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", "Found multiple Host: headers"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", "illegal header line"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n", "bad Content-Length"),
        (b"GET /" + b"x" * 100_000, "Receive buffer too long"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "illegal chunk header"),
    ],
    ids=["request line", "host", "two hosts", "header", "length", "too long", "chunk"],
)
async def test_invalid_http_is_refused_and_counted(sent: bytes, reason: str) -> None:
    observed: list[int] = []
    async with serving(respond_x, edge=Edge(observed.append)) as address:
        first, headers, body = await answer_to(address, sent)
        assert (await answer_to(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[2] == b"x"
    assert first.startswith(b"HTTP/1.1 400")
    assert headers[b"connection"] == b"close"
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_request"
    assert error["message"].startswith(f"Invalid HTTP request: {reason}")
    assert len(error["message"]) < 400
    assert observed == [400]


async def test_invalid_http_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with serving(respond_x) as address:
            for _ in range(20):
                await answer_to(address, b"hello\r\n\r\n")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"GET / HT", b"HTTP/1.1 408"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf", b"HTTP/1.1 408"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", b"HTTP/1.1 408"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP", b"HTTP/1.1 200"),
    ],
    ids=["nothing", "half a head", "half a body", "half of the chunks", "half of the next head"],
)
async def test_a_request_that_does_not_end_is_ended(sent: bytes, status: bytes) -> None:
    limits = ReceiveLimits(head_s=0.1, body_s=0.1)
    async with serving(respond_x, edge=Edge(lambda _: None, limits)) as address:
        first, headers, body = await answer_to(address, sent)
    assert first.startswith(status)
    if status == b"HTTP/1.1 408":
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert headers[b"connection"] == b"close"


async def test_bytes_that_drip_do_not_prolong_the_time_for_a_head() -> None:
    async with serving(respond_x, edge=Edge(lambda _: None, ReceiveLimits(head_s=0.2))) as address:
        reader, writer = await asyncio.open_connection(*address)
        received = asyncio.create_task(reader.readline())  # what is written after the end resets the connection
        with contextlib.suppress(ConnectionError):
            while not received.done():
                writer.write(b"G")
                await asyncio.sleep(0.02)
        assert (await received).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_body_may_take_as_long_as_its_size_justifies() -> None:
    limits = ReceiveLimits(body_s=0.05, body_bytes_per_s=100.0)
    async with serving(respond_x, edge=Edge(lambda _: None, limits)) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1001\r\n\r\n")
        for _ in range(4):
            writer.write(b"x" * 250)
            await asyncio.sleep(0.04)
        writer.write(b"x")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_idle_connection_is_kept_and_then_closed() -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    edge = Edge(lambda _: None, ReceiveLimits(head_s=0.05))
    async with serving(respond_x, edge=edge, keep_alive_s=1.0) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(request)
            await reader.readuntil(b"\r\n\r\nx")
            await asyncio.sleep(0.15)
        assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
        writer.close()


async def test_requests_that_arrive_at_once_are_all_answered() -> None:
    edge = Edge(lambda _: None, turns=Turns(per_pass=1))
    async with serving(respond_x, edge=edge) as address:
        sent = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"
        answers = await asyncio.gather(*(answer_to(address, sent) for _ in range(20)))
    assert [body for _, _, body in answers] == [b"x"] * 20


async def test_waiting_requests_are_bounded_by_their_bytes() -> None:
    edge = Edge(lambda _: None, waiting_bytes=ByteBudget(100))
    async with serving(respond_x, edge=edge) as address:
        first, headers, body = await answer_to(address, b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100)
    assert first.startswith(b"HTTP/1.1 503")
    assert headers[b"retry-after"] == b"1"
    assert json.loads(body)["error"]["reason"] == "bytes"


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


async def test_a_length_given_in_two_ways_is_refused_and_ends_the_connection() -> None:
    body = b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    sent = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + body
    async with serving(RequestContextMiddleware(respond_x, HttpMetrics(CollectorRegistry()))) as address:
        first, headers, rest = await answer_to(address, sent)
    assert first.startswith(b"HTTP/1.1 400")
    assert headers[b"connection"] == b"close"
    assert json.loads(rest)["error"]["code"] == "invalid_request"


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
        await asyncio.wait_for(begun.wait(), TIMEOUT_S)
        writer.write(b"xyz\r\n")
        received = await asyncio.wait_for(reader.read(), TIMEOUT_S)
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
