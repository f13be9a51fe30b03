"""Status and commands for operators over real HTTP, in front of a fake router."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from baton.core.errors import BatonError, ConfigError
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator

TOKENIZER = byte_level_tokenizer()
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


async def test_health_and_readiness_are_reported(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200
    generator.ready = False
    assert (await http.get("/health")).status_code == 200
    response = await http.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker_available")
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 503


async def test_the_root_lists_the_endpoints(http: httpx.AsyncClient) -> None:
    body = (await http.get("/")).json()
    assert body["name"] == "baton"
    for endpoint in body["endpoints"]:
        method, path = endpoint.split(" ")
        path = path.replace("{model}", MODEL).replace("{id}", "known")
        path = "/admin/live?snapshots=1" if path == "/admin/live" else path
        response = await http.request(method, path, json={} if method == "POST" else None)
        are_jobs = path.startswith(("/v1/files", "/v1/batches"))  # which this gateway does not have
        assert response.status_code in ((404,) if are_jobs else (200, 400)), endpoint


async def test_metrics_are_prometheus_text(http: httpx.AsyncClient) -> None:
    response = await http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"baton_up 1" in response.content


async def test_status_and_scale_work(http: httpx.AsyncClient, admin: FakeAdmin) -> None:
    assert (await http.get("/admin/status")).json() == {"pools": {"prefill": 1, "decode": 1}}
    response = await http.post("/admin/scale", json={"prefill": 2, "decode": 3})
    assert response.json() == {"targets": {"prefill": 2, "decode": 3}}
    assert admin.scaled == [{"prefill": 2, "decode": 3}]


async def test_a_pool_is_released_to_the_autoscaler(http: httpx.AsyncClient, admin: FakeAdmin) -> None:
    assert (await http.post("/admin/scale", json={"prefill": "auto", "decode": 3})).status_code == 200
    assert admin.scaled == [{"prefill": None, "decode": 3}]
    assert (await http.post("/admin/scale", json={"prefill": 1, "decode": 4096})).status_code == 200


@pytest.mark.parametrize("target", ["automatic", 0, -1, 4097, 1.0, True, None])
async def test_an_impossible_pool_size_is_refused(target: object, http: httpx.AsyncClient) -> None:
    response = await http.post("/admin/scale", json={"prefill": target})
    assert response.status_code == 400
    assert "prefill must be an integer between 1 and 4096, or auto, got" in response.json()["error"]["message"]


async def test_scaling_to_zero_is_refused_with_the_setting_that_allows_it(http: httpx.AsyncClient) -> None:
    response = await http.post("/admin/scale", json={"decode": 0})
    assert "set autoscaler.enabled to true and autoscaler.decode.min to 0" in response.json()["error"]["message"]


async def test_a_worker_is_moved_to_the_other_pool(http: httpx.AsyncClient, admin: FakeAdmin) -> None:
    assert (await http.post("/admin/move", json={"from": "prefill", "to": "decode"})).json() == {"pools": {}}
    assert admin.moved == [("prefill", "decode")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"from": "prefill"}, "to must be one of prefill, decode"),
        ({"from": "prefil", "to": "decode"}, "from must be one of prefill, decode"),
        ({"from": "prefill", "to": "decode", "count": 2}, "count"),
        ({"from": ["prefill"], "to": "decode"}, "from must be one of"),
    ],
)
async def test_a_wrong_move_is_refused(http: httpx.AsyncClient, admin: FakeAdmin, body, message) -> None:
    response = await http.post("/admin/move", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert admin.moved == []


async def test_plan_and_advice_are_served(http: httpx.AsyncClient) -> None:
    assert (await http.get("/admin/plan")).json() == {"enabled": False}
    for query in ("", "?max_age_s=60"):
        assert (await http.get(f"/admin/advise{query}")).json() == {"texts": ["Keep it."]}
    refused = await http.get("/admin/advise?max_age_s=-1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_age_s")


async def test_recorded_traffic_is_served(http: httpx.AsyncClient, admin: FakeAdmin) -> None:
    assert (await http.get("/admin/trace")).json() == {"requests": await admin.trace()}


async def test_errors_of_the_backend_reach_the_operator(http: httpx.AsyncClient, admin: FakeAdmin) -> None:
    error: BatonError = ConfigError("Only 2 GPUs are left.", param="prefill")
    admin.error = error
    response = await http.post("/admin/scale", json={"prefill": 9})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "Only 2 GPUs are left.")
