"""A stream may be read for as long as its request may take."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import closing
from urllib.parse import urlsplit

import httpx
import pytest

from baton.core.errors import DeadlineError
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.requests.generation import TokenChunk
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, serve
from tests.waiting import until

TOKENIZER = byte_level_tokenizer()
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 32, "stream": True}


def send_and_do_not_read(url: str) -> socket.socket:
    """A client with small buffers, so that soon the server cannot send any more."""
    connection, body = socket.socket(), json.dumps(BODY).encode()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
    connection.settimeout(10.0)
    address = urlsplit(url)
    connection.connect((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    found = []
    while received := connection.recv(65_536):
        found.append(received)
    return b"".join(found)


async def test_a_client_that_stops_reading_is_disconnected_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.gateway.sse._LAST_WORDS_S", 0.05)
    generator = FakeGenerator(TOKENIZER, lambda _: [TokenChunk((40,) * 500)] * 100_000)
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(request_timeout_s=0.1))
    async with serve(app) as url:
        with closing(send_and_do_not_read(url)) as connection:
            await until(lambda: len(generator.cancelled) == 1)
            received = await asyncio.to_thread(read_all, connection)  # to the end: nothing more comes
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


async def test_a_reading_client_gets_the_deadline_error() -> None:
    generator = FakeGenerator(TOKENIZER, lambda _: [TokenChunk((40,)), DeadlineError("It took too long.")])
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(request_timeout_s=1e-6))
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json=BODY)
    last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert (answer.status_code, last["error"]["code"]) == (200, "deadline_exceeded")
