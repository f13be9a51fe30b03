"""With API keys, the ids of requests belong to their key: others can neither read nor notice them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from baton.explain.timelines import Order, TimelineStore
from cluster.gateway.api_keys import ApiKey, ApiKeyConfig, ApiKeys
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, say

TOKENIZER = byte_level_tokenizer()
NAMES = {"alice": "a" * 16, "bob": "b" * 16, "operator": "c" * 16}


class Admin(FakeAdmin):
    def __init__(self, store: TimelineStore) -> None:
        super().__init__()
        self._store = store

    async def timeline(self, request_id: str, owner: str | None = None) -> dict[str, Any]:
        return self._store.find(request_id, owner)

    async def requests(self, order: Order, limit: int) -> list[dict[str, Any]]:
        return self._store.listing(order, limit)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    store, generator = TimelineStore(100), FakeGenerator(TOKENIZER, say(TOKENIZER, "hi"))
    keys = ApiKeys(ApiKeyConfig(name=name, key=key, admin=name == "operator") for name, key in NAMES.items())
    app = create_app(
        generator, TOKENIZER, Admin(store), GatewayLimits(), api_keys=keys, is_kept=store.keeps,
        on_finished=lambda request: [store.add(sequence.timeline) for sequence in request.sequences],
    )  # fmt: skip
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


async def complete(http: httpx.AsyncClient, name: str, request_id: str, **options: object) -> str:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, **options}
    headers = {"Authorization": f"Bearer {NAMES[name]}", "X-Request-Id": request_id}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["id"] == answer.headers["x-request-id"]
    return answer.headers["x-request-id"]


async def read(http: httpx.AsyncClient, name: str, path: str) -> httpx.Response:
    return await http.get(path, headers={"Authorization": f"Bearer {NAMES[name]}"})


async def test_an_id_of_another_key_is_like_an_unknown_one(http: httpx.AsyncClient) -> None:
    assert await complete(http, "alice", "order-1001") == "order-1001"
    theirs = await read(http, "bob", "/v1/requests/order-1001/timeline")
    unknown = await read(http, "bob", "/v1/requests/order-9999/timeline")
    assert (theirs.status_code, theirs.text.replace("1001", "9999")) == (404, unknown.text)
    tagged = await read(http, "bob", f"/v1/requests/{ApiKey('alice').owner}:order-1001/timeline")
    assert tagged.status_code == 404
    assert await complete(http, "bob", "order-1001") == "order-1001"
    for name in ("alice", "bob"):
        assert (await read(http, name, "/v1/requests/order-1001/timeline")).json()["request_id"] == "order-1001"
    assert (await complete(http, "alice", "order-1001")).startswith("order-1001-")


async def test_an_admin_key_reads_all(http: httpx.AsyncClient) -> None:
    await complete(http, "alice", "order-1001")
    await complete(http, "bob", "order-1001", n=2)
    newest = (await read(http, "operator", "/v1/requests/order-1001/timeline")).json()
    assert newest["request_id"] == f"{ApiKey('bob').owner}:order-1001"
    assert len(newest["sequences"]) == 2
    listed = (await read(http, "operator", "/v1/requests")).json()["data"]
    for entry in listed:
        found = await read(http, "operator", f"/v1/requests/{entry['request_id']}/timeline")
        assert found.json()["request_id"] == entry["request_id"]
    assert (await read(http, "bob", "/v1/requests")).status_code == 403
