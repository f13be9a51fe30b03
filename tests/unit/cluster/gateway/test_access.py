"""The gateway's access log and counters: one line and two counts per request, without the client's content."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.core.errors import DeadlineError, OverloadedError
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.telemetry.metrics import HttpMetrics
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, say

TOKENIZER = byte_level_tokenizer()
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
COMPLETIONS = "/v1/completions"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator(TOKENIZER, say(TOKENIZER, "hi"))


@pytest.fixture
async def http(generator: FakeGenerator, registry: CollectorRegistry) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(), HttpMetrics(registry))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


def answered(registry: CollectorRegistry, endpoint: str, status: int) -> float:
    labels = {"endpoint": endpoint, "status": str(status)}
    return registry.get_sample_value("baton_http_requests_total", labels) or 0.0


def rejected(registry: CollectorRegistry, reason: str) -> float:
    return registry.get_sample_value("baton_rejections_total", {"reason": reason}) or 0.0


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
async def test_probes_can_use_head(http: httpx.AsyncClient, path: str) -> None:
    response = await http.head(path)
    assert response.status_code == 200
    assert (await http.get(path)).status_code == 200


async def test_head_reports_when_no_worker_is_ready(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.ready = False
    assert (await http.head("/ready")).status_code == 503


@pytest.mark.parametrize(
    ("body", "error", "reason", "status"),
    [
        (COMPLETION, OverloadedError("busy"), "overloaded", 429),
        (COMPLETION, DeadlineError("late"), "deadline_exceeded", 504),
        (COMPLETION, ValueError("a bug"), "internal_error", 500),
        ({**COMPLETION, "model": "made-up"}, None, "model_not_found", 404),
        ({**COMPLETION, "prompt": "a" * 500}, None, "context_length_exceeded", 400),
        ({**COMPLETION, "max_tokens": -1}, None, "invalid_request", 400),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_rejections_are_counted_by_reason(http, generator, registry, body, error, reason, status) -> None:
    if error is not None:
        generator.script = lambda request: [error]
    response = await http.post(COMPLETIONS, json=body)
    assert response.status_code == status
    assert rejected(registry, reason) == 1
    assert answered(registry, COMPLETIONS, status) == 1


async def test_answered_requests_are_not_rejections(http: httpx.AsyncClient, registry: CollectorRegistry) -> None:
    assert (await http.post(COMPLETIONS, json=COMPLETION)).status_code == 200
    assert (await http.post(COMPLETIONS, json={**COMPLETION, "stream": True})).status_code == 200
    assert (await http.get("/v1/models/made-up")).status_code == 404
    assert answered(registry, COMPLETIONS, 200) == 2
    values = [sample.value for family in registry.collect() for sample in family.samples
              if sample.name == "baton_rejections_total"]  # fmt: skip
    assert values
    assert sum(values) == 0


async def test_paths_are_counted_by_route(http: httpx.AsyncClient, registry: CollectorRegistry) -> None:
    for path in ("/made/up", "/made/up/too", "/v1/models/a", "/v1/models/b/c", "/v1/requests/known/timeline"):
        await http.get(path)
    assert answered(registry, "other", 404) == 2
    assert answered(registry, "/v1/models/{name:path}", 404) == 2
    assert answered(registry, "/v1/requests/{request_id}/timeline", 200) == 1


async def test_every_request_is_logged_in_one_line(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cluster.gateway.http_edge"):
        await http.post(COMPLETIONS, json={**COMPLETION, "model": "my secret"}, headers={"X-Request-Id": "mine"})
        await http.get("/my-secret?my=secret", headers={"X-Request-Id": "other"})
    first, second = (vars(record) for record in caplog.records if record.name == "cluster.gateway.http_edge")
    assert (first["request_id"], first["endpoint"], first["status"], first["code"]) == (
        *("mine", COMPLETIONS, 404),
        "model_not_found",
    )
    assert (second["request_id"], second["endpoint"], second["status"]) == ("other", "other", 404)
    assert "secret" not in f"{first} {second}"


async def test_probes_are_not_logged(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "cluster.gateway.http_edge"):
        for path in ("/health", "/metrics", "/ready", "/v1/models"):
            await http.get(path)
    levels = [record.levelno for record in caplog.records if record.name == "cluster.gateway.http_edge"]
    assert levels == [logging.DEBUG] * 3 + [logging.INFO]
