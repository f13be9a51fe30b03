"""A request counts from when its bytes reached the machine, not from when somebody had time to read them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from cluster.http_protocol import TimedH11Protocol
from cluster.request_times import ArrivalTimes, RequestTimesMiddleware, arrival_of, call_when_over
from tests.unit.cluster.fakes import eventually

_BUSY_S = 0.4
_TOLERANCE_S = 0.1
"""Of the kernel's own clock, which counts in ticks."""


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@pytest.mark.parametrize("is_connected", [True, False], ids=["on an open connection", "not accepted yet"])
async def test_time_in_the_kernel_counts(is_connected: bool) -> None:
    seen: list[ArrivalTimes] = []

    async def app(scope, receive, send):
        seen.append(arrival_of(Request(scope)))
        await PlainTextResponse("x")(scope, receive, send)

    config = uvicorn.Config(
        RequestTimesMiddleware(app), host="127.0.0.1", port=0, lifespan="off", http=TimedH11Protocol, log_level="error"
    )
    server = Server(config)
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    address = server.servers[0].sockets[0].getsockname()
    raw = socket.create_connection(address)
    try:
        if is_connected:
            await asyncio.sleep(0.05)
        sent_s = time.monotonic()
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        time.sleep(_BUSY_S)  # noqa: ASYNC251 - the event loop is busy
        await eventually(lambda: len(seen) == 1)
    finally:
        raw.close()
        server.should_exit = True
        await serving
    assert seen[0].received_s == pytest.approx(sent_s, abs=_TOLERANCE_S)
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
