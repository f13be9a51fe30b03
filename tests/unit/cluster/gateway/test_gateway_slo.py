"""SLO classes and API keys through the gateway: selection, answers and records."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.core.slo import BUILTIN_CLASSES, INTERACTIVE, SloClasses
from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.routing.routing_contracts import Preference, RouteDecision, RoutingRequest, WorkerSnapshot
from cluster.telemetry.metrics import HttpMetrics
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, say
from tests.unit.cluster.instant_cluster import InstantCluster

TOKENIZER = byte_level_tokenizer()
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HEADER = "X-Baton-SLO-Class"
KEY, BATCH_KEY, ADMIN_KEY = "key-of-the-website", "key-of-the-crawler", "key-of-the-operator"
KEYS = ApiKeys(
    ApiKeyConfig.model_validate(values)
    for values in (
        {"name": "website", "key": KEY},
        {"name": "crawler", "key": BATCH_KEY, "slo_class": "batch"},
        {"name": "operator", "key": ADMIN_KEY, "admin": True},
    )
)


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator(TOKENIZER, say(TOKENIZER, "hi"))


@pytest.fixture
async def http(generator: FakeGenerator) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(), slo_classes=SloClasses())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def locked(generator: FakeGenerator, registry: CollectorRegistry) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that asks for keys."""
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(), HttpMetrics(registry), api_keys=KEYS)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, COMPLETION), (CHATS, CHAT)])
@pytest.mark.parametrize(
    ("parameters", "headers", "name"),
    [
        ({}, {}, "standard"),
        ({"service_tier": None}, {}, "standard"),
        ({"service_tier": "auto"}, {}, "standard"),
        ({"service_tier": "flex"}, {}, "batch"),
        ({"service_tier": "interactive"}, {}, "interactive"),
        ({}, {HEADER: "batch"}, "batch"),
        ({"service_tier": "flex"}, {HEADER: "interactive"}, "interactive"),
    ],
)
async def test_every_sequence_carries_the_chosen_class(
    http: httpx.AsyncClient, generator: FakeGenerator, path, body, parameters, headers, name
) -> None:
    response = await http.post(path, json={**body, **parameters, "n": 2}, headers=headers)
    assert response.status_code == 200
    assert [request.slo.name for request in generator.requests] == [name, name]


async def test_only_chats_that_request_a_tier_get_one_in_the_response(http: httpx.AsyncClient) -> None:
    async def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return (await http.post(path, json=body)).json()

    assert "service_tier" not in await answer(CHATS, CHAT)
    assert (await answer(CHATS, {**CHAT, "service_tier": "auto"}))["service_tier"] == "default"
    assert (await answer(CHATS, {**CHAT, "service_tier": "flex"}))["service_tier"] == "flex"
    assert "service_tier" not in await answer(COMPLETIONS, {**COMPLETION, "service_tier": "flex"})


async def test_every_chunk_of_a_stream_names_the_tier(http: httpx.AsyncClient) -> None:
    body = {**CHAT, "service_tier": "priority", "stream": True, "stream_options": {"include_usage": True}}
    text = (await http.post(CHATS, json=body)).text
    chunks = [line for line in text.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 2
    assert all('"service_tier":"priority"' in chunk for chunk in chunks)


async def test_two_different_classes_in_one_request_are_refused(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    twice = [(HEADER, "interactive"), (HEADER, "batch")]
    response = await http.post(COMPLETIONS, json=COMPLETION, headers=twice)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, HEADER)
    assert "has 2 different values; send one" in error["message"]
    assert (await http.post(COMPLETIONS, json=COMPLETION, headers=[twice[1], twice[1]])).status_code == 200


@pytest.mark.parametrize(
    ("parameters", "headers", "param"),
    [({"service_tier": "gold"}, {}, "service_tier"), ({}, {HEADER: "gold"}, HEADER), ({}, {HEADER: ""}, HEADER)],
)
async def test_an_unknown_class_is_refused_with_the_known_classes(
    http: httpx.AsyncClient, generator: FakeGenerator, parameters, headers, param
) -> None:
    response = await http.post(COMPLETIONS, json={**COMPLETION, **parameters}, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert "interactive, standard, batch" in error["message"]
    assert generator.requests == []


async def test_a_key_sets_its_class_and_a_request_can_override_it(
    locked: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    for key, parameters in (
        (KEY, {}),
        (BATCH_KEY, {}),
        (BATCH_KEY, {"service_tier": "auto"}),
        (BATCH_KEY, {"service_tier": "default"}),
    ):
        assert (
            await locked.post(COMPLETIONS, json={**COMPLETION, **parameters}, headers=bearer(key))
        ).status_code == 200
    assert [request.slo.name for request in generator.requests] == ["standard", "batch", "batch", "standard"]


@pytest.mark.parametrize("headers", [{}, bearer("a-key-that-is-wrong"), {"Authorization": f"Basic {KEY}"}])
@pytest.mark.parametrize("path", [COMPLETIONS, "/admin/scale"])
async def test_without_a_known_key_nothing_is_served(
    locked: httpx.AsyncClient, generator: FakeGenerator, registry: CollectorRegistry, headers, path
) -> None:
    response = await locked.post(path, json={**COMPLETION, "prompt": "x" * 100_000}, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert response.headers["www-authenticate"] == "Bearer"
    assert generator.requests == []
    assert registry.get_sample_value("baton_http_requests_total", {"endpoint": path, "status": "401"}) == 1


async def test_operators_have_their_own_keys(locked: httpx.AsyncClient) -> None:
    response = await locked.get("/admin/status", headers=bearer(KEY))
    assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
    assert (await locked.get("/admin/status", headers=bearer(ADMIN_KEY))).status_code == 200
    # The same holds for the list of all requests; a client that knows an id may fetch that one.
    assert (await locked.get("/v1/requests", headers=bearer(KEY))).status_code == 403
    assert (await locked.get("/v1/requests", headers=bearer(ADMIN_KEY))).status_code == 200
    assert (await locked.get("/v1/models", headers=bearer(KEY))).status_code == 200


@pytest.mark.parametrize("path", ["/", "/ready", "/metrics"])
async def test_status_and_metrics_need_any_key(locked: httpx.AsyncClient, path: str) -> None:
    assert (await locked.get("/health")).status_code == 200
    for method in ("GET", "HEAD"):
        assert (await locked.request(method, path)).status_code in (401, 405)
    assert (await locked.get(path, headers=bearer(KEY))).status_code == 200


async def test_without_configured_keys_any_key_is_accepted(http: httpx.AsyncClient) -> None:
    assert (await http.post(COMPLETIONS, json=COMPLETION, headers=bearer("none"))).status_code == 200


async def test_the_access_log_names_class_and_owner_but_no_key(
    locked: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        await locked.post(COMPLETIONS, json=COMPLETION, headers=bearer(BATCH_KEY))
        await locked.post(COMPLETIONS, json=COMPLETION, headers=bearer("a-key-that-is-wrong"))
        await locked.post(COMPLETIONS, json=COMPLETION, headers={**bearer(KEY), HEADER: "made-up-class"})
    lines = [vars(record) for record in caplog.records if record.name == "cluster.gateway.http_edge"]
    assert [(line.get("slo_class"), line.get("api_key"), line["status"]) for line in lines] == [
        ("batch", "crawler", 200),
        (None, None, 401),
        (None, "website", 400),
    ]
    for secret in (KEY, BATCH_KEY, "a-key-that-is-wrong", "made-up-class"):
        assert secret not in str(lines)


@pytest.fixture
async def cluster() -> AsyncIterator[InstantCluster]:
    running = InstantCluster()
    yield running
    await running.stop()


async def test_the_outcome_of_a_request_is_in_metrics_log_and_timeline(
    cluster: InstantCluster, caplog: pytest.LogCaptureFixture
) -> None:
    app = await cluster.start()
    transport = httpx.ASGITransport(app)
    with caplog.at_level(logging.INFO):
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            for stream in (False, True):
                body = {**COMPLETION, "stream": stream}
                assert (await http.post(COMPLETIONS, json=body, headers={HEADER: "batch"})).status_code == 200
    answered = [vars(record) for record in caplog.records if record.name == "cluster.gateway.http_edge"]
    assert [(line["slo_class"], line["slo_met"]) for line in answered] == [("batch", True)] * 2
    [ended, _] = [vars(record) for record in caplog.records if record.name == "cluster.dispatch.router"]
    assert (ended["slo_class"], ended["slo_result"], ended["slo_ttft_target_ms"]) == ("batch", "met", 60_000.0)
    assert 0 < ended["slo_ttft_margin_ms"] < 60_000
    assert 0 < ended["slo_tpot_margin_ms"] < 500
    status = cluster.metrics.slo.status()
    assert {name: slo["windows"]["1h"]["requests"] for name, slo in status.items()} == {
        "interactive": 0, "standard": 0, "batch": 2,
    }  # fmt: skip
    value = cluster.metrics.registry.get_sample_value
    assert value("baton_slo_requests_total", {"slo_class": "batch", "result": "met"}) == 2
    assert value("baton_time_to_first_token_seconds_count", {"slo_class": "batch"}) == 2
    assert value("baton_time_per_output_token_seconds_count", {"slo_class": "batch"}) == 2


async def test_an_answer_ended_by_a_stop_string_counts(cluster: InstantCluster) -> None:
    """The gateway closes its sequence as if the client had gone away."""
    app = await cluster.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        body = {**COMPLETION, "stop": [TOKENIZER.decode([40])]}
        assert (await http.post(COMPLETIONS, json=body)).status_code == 200
    value = cluster.metrics.registry.get_sample_value
    assert value("baton_slo_requests_total", {"slo_class": "standard", "result": "met"}) == 1


class Recorder:
    """Takes the first worker of each pool."""

    def __init__(self) -> None:
        self.seen: list[RoutingRequest] = []

    def choose(
        self,
        prefill: Sequence[WorkerSnapshot],
        decode: Sequence[WorkerSnapshot],
        request: RoutingRequest,
        preferred: Preference | None = None,
    ) -> RouteDecision:
        self.seen.append(request)
        return RouteDecision(prefill[0].worker_id, decode[0].worker_id, 0, 1.0, 1.0)


async def test_policies_receive_the_class(cluster: InstantCluster) -> None:
    cluster.chooser = recorder = Recorder()
    app = await cluster.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        assert (await http.post(COMPLETIONS, json=COMPLETION, headers={HEADER: "interactive"})).status_code == 200
    assert {request.slo for request in recorder.seen} == {INTERACTIVE}


async def test_a_rejected_request_is_a_miss(cluster: InstantCluster, caplog: pytest.LogCaptureFixture) -> None:
    app = await cluster.start(max_inflight=1)
    with caplog.at_level(logging.INFO, "cluster.gateway.http_edge"):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
            response = await http.post(COMPLETIONS, json={**COMPLETION, "prompt": ["a", "b"]})
    assert response.status_code == 429
    value = cluster.metrics.registry.get_sample_value
    # The other prompt was cancelled with it: the client is still connected and gets neither answer.
    assert value("baton_slo_requests_total", {"slo_class": "standard", "result": "rejected"}) == 2
    assert value("baton_slo_requests_total", {"slo_class": "standard", "result": "excluded"}) == 0
    assert value("baton_slo_attainment_ratio", {"slo_class": "standard", "window": "1m"}) == 0.0
    [line] = [vars(record) for record in caplog.records if record.name == "cluster.gateway.http_edge"]
    assert line["slo_met"] is False


def test_the_instant_cluster_has_the_built_in_classes(cluster: InstantCluster) -> None:
    assert list(cluster.metrics.slo.status()) == [slo.name for slo in BUILTIN_CLASSES]
