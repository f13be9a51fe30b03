"""Connections beyond the limit are answered and closed; a lack of file descriptors only delays new connections."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import socket

import pytest
from starlette.responses import PlainTextResponse

from baton.core.errors import ConfigError
from baton.process.descriptors import raise_descriptor_limit
from cluster.gateway import listener as listener_module
from cluster.gateway.connections import NUM_SPARE, choose_max_connections
from cluster.gateway.http_protocol import Edge
from tests.unit.cluster.gateway.edge_serving import answer_to, serving
from tests.waiting import TIMEOUT_S, until

GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
APP = PlainTextResponse("x")


async def test_connections_beyond_the_limit_get_a_typed_answer_and_health_still_answers() -> None:
    observed: list[int] = []
    async with serving(APP, edge=Edge(observed.append), max_connections=1) as address:
        _, kept = await asyncio.open_connection(*address)
        await asyncio.sleep(0)
        first, headers, body = await answer_to(address, GET)
        assert first == b"HTTP/1.1 503 Service Unavailable"
        assert (headers[b"connection"], headers[b"retry-after"]) == (b"close", b"1")
        error = json.loads(body)["error"]
        assert (error["code"], error["reason"]) == ("endpoint_full", "connections")
        assert "router.max_connections" in error["message"]
        first, _, body = await answer_to(address, HEALTH)
        assert (first, json.loads(body)) == (b"HTTP/1.1 200 OK", {"status": "ok"})
        first, _, body = await answer_to(address, HEALTH.replace(b"GET", b"HEAD"))
        assert (first, body) == (b"HTTP/1.1 200 OK", b"")
        assert (await answer_to(address, HEALTH.replace(b"/health", b"/healthy")))[0].startswith(b"HTTP/1.1 503")
        kept.close()
        await until_served(address)
    assert set(observed) == {503}


async def until_served(address: tuple[str, int]) -> None:
    """Asks until an earlier connection has ended."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (await answer_to(address, GET))[0].startswith(b"HTTP/1.1 200"):
            pass


async def test_a_large_request_beyond_the_limit_reads_its_answer() -> None:
    async with serving(APP, max_connections=1) as address:
        _, kept = await asyncio.open_connection(*address)
        await asyncio.sleep(0)
        sent = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 4_000_000
        assert (await answer_to(address, sent))[0].startswith(b"HTTP/1.1 503")
        kept.close()


async def test_silent_connections_beyond_the_limit_do_not_stay() -> None:
    async with serving(APP, max_connections=1) as address:
        held = [await asyncio.open_connection(*address) for _ in range(1 + NUM_SPARE)]
        assert (await answer_to(address, HEALTH))[0].startswith(b"HTTP/1.1 200")
        for _, writer in held:
            writer.close()


async def test_a_burst_beyond_the_limit_is_answered_completely() -> None:
    async with serving(APP, max_connections=5) as address:
        kept = [await asyncio.open_connection(*address) for _ in range(5)]
        answers = await asyncio.gather(*(answer_to(address, GET) for _ in range(2 * NUM_SPARE)))
        for _, writer in kept:
            writer.close()
    assert {first for first, _, _ in answers} == {b"HTTP/1.1 503 Service Unavailable"}


async def test_accepting_goes_on_when_file_descriptors_are_free_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_module, "_RETRY_S", 0.05)
    attempts: list[int] = []
    accept = socket.socket.accept

    def exhausted(self: socket.socket):
        attempts.append(1)
        if len(attempts) <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    async with serving(APP) as address:
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", exhausted)
            assert (await answer_to(address, GET))[2] == b"x"
    assert [record.message for record in caplog.records] == [
        "no connection can be accepted (Too many open files); trying again"
    ]


async def test_a_client_that_leaves_before_it_is_accepted_takes_no_place() -> None:
    async with serving(APP, max_connections=1) as address:
        for _ in range(5):
            with socket.create_connection(address):
                pass
        await until_served(address)


def test_the_limit_leaves_files_for_other_connections() -> None:
    assert choose_max_connections(None, 1024) == 1024 - NUM_SPARE - 256
    assert choose_max_connections(None, 20_000) == 15_000 - NUM_SPARE
    assert choose_max_connections(None, 10**6) == 16_384
    assert choose_max_connections(None, 64) == 1
    assert choose_max_connections(20, 1024) == 20
    with pytest.raises(ConfigError, match=r"router\.max_connections is 900, .* enough for 512"):
        choose_max_connections(900, 1024)


def test_the_soft_limit_of_files_becomes_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert raise_descriptor_limit() == 4096
    assert raise_descriptor_limit() == 4096
    assert limits[1:] == [(4096, 4096)]


def test_a_refused_change_leaves_the_limit_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_, new) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_descriptor_limit() == 1024


async def test_connections_are_closed_when_the_server_stops() -> None:
    async with serving(APP) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nx")
    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
    writer.close()


async def test_the_limit_counts_open_connections_only() -> None:
    seen: list[int] = []

    async def app(scope, receive, send):
        seen.append(1)
        await APP(scope, receive, send)

    async with serving(app, max_connections=1) as address:
        for number in range(5):
            await until_served(address)
            await until(lambda number=number: len(seen) > number)
