"""The gateway's answers to bad requests and internal errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from baton.core.errors import InvalidRequestError
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.requests.generation import TokenChunk
from tests.bad_inputs import BadInput, bad_inputs
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import CONTEXT_LENGTH, MODEL, TEXT, FakeAdmin, FakeGenerator
from tests.unit.cluster.gateway.edge_serving import answer_to, serving

TOKENIZER = byte_level_tokenizer()
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 32}


@pytest.fixture
async def direct(generator: FakeGenerator, admin: FakeAdmin) -> AsyncIterator[httpx.AsyncClient]:
    """Calls the application without a server, which is much faster to set up."""
    transport = httpx.ASGITransport(create_app(generator, TOKENIZER, admin, GatewayLimits()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@pytest.mark.parametrize("bad", bad_inputs(MODEL, CONTEXT_LENGTH), ids=lambda bad: bad.name)
async def test_bad_input_is_refused(direct: httpx.AsyncClient, generator: FakeGenerator, bad: BadInput) -> None:
    response = await direct.request(bad.method, bad.path, content=bad.content, headers=bad.headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (bad.status, bad.code, bad.param), error
    assert bad.fragment in error["message"]
    assert len(error["message"]) < 1500
    assert set(error) == {"message", "type", "param", "code"}
    assert "x-request-id" in response.headers
    assert generator.requests == []


async def test_bad_input_over_real_http_affects_no_other_request(http: httpx.AsyncClient) -> None:
    good = [http.post("/v1/completions", json=COMPLETION) for _ in range(20)]
    table = bad_inputs(MODEL, CONTEXT_LENGTH)
    bad = [http.request(item.method, item.path, content=item.content, headers=item.headers) for item in table]
    answers = await asyncio.gather(*good, *bad)
    assert [answer.json()["choices"][0]["text"] for answer in answers[:20]] == [TEXT] * 20
    assert [answer.status_code for answer in answers[20:]] == [item.status for item in table]


def test_names_of_bad_inputs_are_unique() -> None:
    names = [bad.name for bad in bad_inputs(MODEL, CONTEXT_LENGTH)]
    assert len(names) == len(set(names)) > 120


@pytest.mark.parametrize(
    ("path", "content_type", "num_bytes", "status"),
    [
        ("/v1/chat/completions", "application/json", 1 << 30, 413),
        ("/v1/chat/completions", "text/html", 100, 415),
        ("/v1/files", "multipart/form-data; boundary=x", 1 << 30, 404),  # this gateway has no jobs
    ],
)
@pytest.mark.parametrize("expect", [b"Expect: 100-continue\r\n", b""])
async def test_a_client_need_not_send_a_refused_body(
    generator: FakeGenerator,
    admin: FakeAdmin,
    path: str,
    content_type: str,
    num_bytes: int,
    status: int,
    expect: bytes,
) -> None:
    app = create_app(generator, TOKENIZER, admin, GatewayLimits())
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {num_bytes}\r\n"
    async with serving(app) as address:
        first, headers, body = await answer_to(address, head.encode() + expect + b"\r\n")
    assert first.split()[1] == str(status).encode()  # it is the first answer, and the connection ends
    assert headers[b"connection"] == b"close"
    assert json.loads(body)["error"]["message"]


async def test_the_body_limit_holds_without_a_content_length(http: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"a" * 1024 * 1024

    headers = {"Content-Type": "application/json"}
    response = await http.post("/v1/completions", content=endless(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200


@pytest.mark.parametrize("headers", [{"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}])
async def test_a_body_refused_by_its_headers_is_still_read(direct: httpx.AsyncClient, headers: dict[str, str]) -> None:
    """A client that is cut off while it sends may never read the answer."""
    parts = [b"a" * 1000] * 4

    async def body() -> AsyncIterator[bytes]:
        while parts:
            yield parts.pop()

    response = await direct.post("/v1/completions", content=body(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert not parts


async def test_a_body_just_below_the_limit_is_read(http: httpx.AsyncClient) -> None:
    body = json.dumps({**COMPLETION, "user": "a" * (8 * 1024 * 1024 - 200)})
    response = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200


async def test_unexpected_errors_leak_nothing(
    http: httpx.AsyncClient, generator: FakeGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    generator.script = lambda request: [ValueError("the prompt was: my secret")]
    with caplog.at_level(logging.ERROR):
        response = await http.post("/v1/chat/completions", json=CHAT)
    request_id = response.headers["x-request-id"]
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text + caplog.text
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(record)["request_id"] == request_id
    assert "ValueError" in record.getMessage()


async def test_unexpected_errors_in_a_stream_leak_nothing(
    http: httpx.AsyncClient, generator: FakeGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    generator.script = lambda request: [TokenChunk((40,)), ValueError("my secret")]
    with caplog.at_level(logging.ERROR):
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert (
        json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == "internal_error"
    )
    assert "secret" not in response.text + caplog.text


async def test_a_generator_that_ends_early_is_an_internal_error(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = lambda request: [TokenChunk((40,))]
    response = await http.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {**COMPLETION, "guided_regex": "a+"}, "guided_regex"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {**CHAT, "stream": True, "structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ("/v1/responses", {"input": "hello", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
async def test_a_grammar_that_fails_within_its_answer_names_its_parameter(
    direct: httpx.AsyncClient, generator: FakeGenerator, path: str, body: dict[str, Any], param: str
) -> None:
    generator.script = lambda request: [InvalidRequestError("The grammar became too complex.")]
    error = (await direct.post(path, json=body)).json()["error"]
    assert (error["param"], error["message"]) == (param, "The grammar became too complex.")
