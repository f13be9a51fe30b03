"""Timelines that the gateway records and serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from baton.core.timeline import Event
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, say, serve
from tests.waiting import TIMEOUT_S, until

TOKENIZER = byte_level_tokenizer()
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 32}


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator(TOKENIZER, say(TOKENIZER, "hello world, the quick brown fox", cached=16))


@pytest.fixture
async def http(generator: FakeGenerator) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits())
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timeline_has_the_stages_of_the_gateway(
    http: httpx.AsyncClient, generator: FakeGenerator, stream: bool
) -> None:
    await http.post("/v1/completions", json={**COMPLETION, "stream": stream})
    timeline = generator.requests[0].timeline
    assert timeline.request_id == generator.requests[0].request_id
    order = [Event.RECEIVED, Event.ACCEPTED, Event.PARSED, Event.TOKENIZED]
    order += [Event.FIRST_TOKEN_SENT] if stream else []
    order += [Event.DETOKENIZED, Event.SENT]
    assert list(timeline.events) == order
    assert sorted(timeline.events.values()) == list(timeline.events.values())


async def test_whole_choices_are_answered_together(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    await http.post("/v1/completions", json={**COMPLETION, "n": 2})
    ends = [request.timeline.events for request in generator.requests]
    assert ends[0][Event.RESPONDED] == ends[1][Event.RESPONDED] >= max(end[Event.DETOKENIZED] for end in ends)


async def test_a_disconnected_client_has_no_sent_time(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = lambda _: [None]
    hanging = asyncio.create_task(http.post("/v1/completions", json=COMPLETION))
    await until(lambda: len(generator.requests) == 1)
    hanging.cancel()
    await until(lambda: len(generator.cancelled) == 1)
    assert Event.SENT not in generator.requests[0].timeline.events


async def test_requests_are_listed(http: httpx.AsyncClient) -> None:
    answer = (await http.get("/v1/requests?order=slowest&limit=1")).json()
    assert answer == {"object": "list", "data": [{"request_id": "known", "order": "slowest"}]}


@pytest.mark.parametrize(
    ("query", "fragment"),
    [
        ("order=fastest", "newest, slowest, slowest_first_token"),
        ("limit=0", "between 1 and"),
        ("limit=many", "between 1 and"),
        ("sort=newest", "Unknown query parameter 'sort'"),
    ],
)
async def test_an_invalid_listing_is_refused(http: httpx.AsyncClient, query: str, fragment: str) -> None:
    answer = await http.get(f"/v1/requests?{query}")
    assert answer.status_code == 400
    assert fragment in answer.json()["error"]["message"]


async def test_the_timeline_endpoint_serves_stored_timelines(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/requests/known/timeline")).json() == {"request_id": "known", "events": []}
