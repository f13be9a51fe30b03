"""Requests made to harm: each gets a typed answer or an ended connection, and the next client is served."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, say
from tests.unit.cluster.gateway.edge_serving import answer_to, serving

TOKENIZER = byte_level_tokenizer()
KEYS = ApiKeys([ApiKeyConfig(name="ops", key="0123456789abcdef", admin=True)])
OPEN = {"/health"}
"""What docs/api.md says to answer without a key."""

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEADS = {
    "nothing but an end": b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a NUL in the path": b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a NUL in a header": b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    "a line folded into a header": b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\nTransfer-Encoding : chunked\r\n\r\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length : 5\r\n\r\nhello",
    "a thousand headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: bbbbbbbbbbbbbbbbbbbbbbbbb\r\n" * 1000 + b"\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
    "a long target": b"GET /health?" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a negative length": POST + b"Content-Length: -5\r\n\r\nhello",
    "a signed length": POST + b"Content-Length: +5\r\n\r\nhello",
    "a huge length": POST + b"Content-Length: 99999999999999999999999\r\n\r\nhello",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another encoding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a huge chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffffff\r\n",
}


def app_of(keys: ApiKeys | None = None, open_paths: Collection[str] = ()) -> FastAPI:
    generator = FakeGenerator(TOKENIZER, say(TOKENIZER, "hi"))
    limits = GatewayLimits(max_body_bytes=2000)
    return create_app(generator, TOKENIZER, FakeAdmin(), limits, api_keys=keys, open_paths=open_paths)


@pytest.mark.parametrize("name", HEADS)
async def test_a_hostile_request_gets_a_typed_error(name: str) -> None:
    async with serving(app_of()) as address:
        first, headers, body = await answer_to(address, HEADS[name])
        assert first.split()[1] in (b"400", b"413", b"501"), first
        assert headers[b"connection"] == b"close"
        assert json.loads(body)["error"]["code"] in ("invalid_request", "request_too_large")
        good = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert (await answer_to(address, good))[0] == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("open_paths", [set(), {"/ready"}, {"/", "/ready", "/metrics"}], ids=len)
async def test_only_documented_paths_answer_without_a_key(open_paths: set[str]) -> None:
    app, opened_paths = app_of(KEYS, open_paths), OPEN | open_paths
    paths = [(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods]
    assert len(paths) > len(opened_paths)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for method, template in [*paths, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/redoc")]:
            path = template.replace("{name:path}", MODEL).replace("{request_id}", "known")
            for variant in variants_of(path, opened_paths):
                answer = await http.request(method, variant, json={} if method == "POST" else None)
                opened = answer.status_code not in (401, 404, 405)
                assert opened is (variant in opened_paths), (method, variant, answer.status_code)


def variants_of(path: str, opened_paths: Collection[str]) -> Iterator[str]:
    yield path
    if path not in opened_paths:
        yield from (f"{path}/", path.upper(), f"/health/..{path}", f"{path}?a=/health", f"{path};/health")
