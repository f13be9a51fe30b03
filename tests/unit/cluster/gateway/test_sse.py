"""A stream may be read for as long as its request may take."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from urllib.parse import urlsplit

import httpx
import pytest

from baton.core.errors import DeadlineError
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.server_events import encode_event, encode_typed_event, json_bytes
from cluster.requests.generation import GenerationRequest, TokenChunk
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


def test_an_event_is_one_line_for_every_client() -> None:
    data = {"type": "t", "text": "a\u2028b\u2029c\x85d\n\r\x0b\x0c\x1c\x1eé日\u2027"}
    event = encode_typed_event(data).decode()
    assert [line.partition(":")[0] for line in event.splitlines()] == ["event", "data", ""]
    assert json.loads(event.splitlines()[1].removeprefix("data: ")) == data
    assert "é日\u2027" in event  # other characters stay as they are


async def test_a_silent_stream_sends_comments_before_the_first_token_and_between_tokens() -> None:
    generator = FakeGenerator(TOKENIZER, lambda _: [None])
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(comment_every_s=0.01))
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as client:
        for script in ([None], [TokenChunk((40,)), None]):
            generator.script = lambda _, script=script: script
            num_comments = 0
            async with client.stream("POST", "/v1/completions", json=BODY) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    num_comments += line == ": waiting"
                    if num_comments == 3:
                        break
        await until(lambda: len(generator.cancelled) == 2)  # the client has left


async def test_an_error_of_a_silent_stream_is_an_event() -> None:
    may_fail = asyncio.Event()

    class Late(FakeGenerator):
        async def _play(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            await may_fail.wait()
            raise DeadlineError("It took too long.")
            yield TokenChunk((40,))

    app = create_app(Late(TOKENIZER, lambda _: []), TOKENIZER, FakeAdmin(), GatewayLimits(comment_every_s=0.01))
    events = []
    async with (
        serve(app) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        async for line in answer.aiter_lines():
            may_fail.set()
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
    assert [event["error"]["code"] for event in events] == ["deadline_exceeded"]


async def test_a_client_that_leaves_before_the_first_token_ends_the_work() -> None:
    generator = FakeGenerator(TOKENIZER, lambda _: [None])
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(comment_every_s=60.0))
    async with serve(app) as url:
        with closing(send_and_do_not_read(url)):
            await until(lambda: len(generator.requests) == 1)
        await until(lambda: len(generator.cancelled) == 1)


@pytest.mark.parametrize("value", [10**30, "\ud83d", [[]] * 3, {"a": "ä"}])
def test_every_value_of_a_client_can_be_answered(value: object) -> None:
    """orjson writes neither integers beyond 64 bits nor halves of characters."""
    assert json.loads(json_bytes(value)) == value
    assert json.loads(encode_event(value).removeprefix(b"data: ")) == value


def test_numbers_that_are_not_finite_are_null() -> None:
    assert json.loads(json_bytes([float("inf")])) == [None]
    assert json.loads(json_bytes([10**30, float("inf"), float("nan")])) == [10**30, None, None]


def test_deep_values_can_be_answered() -> None:
    deep: list[object] = []
    for _ in range(400):
        deep = [deep]
    assert json.loads(json_bytes(deep)) == deep
