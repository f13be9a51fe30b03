"""Label sets stay bounded, whatever clients send: thousands of requests of every kind leave no trace in what series
exist."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from fastapi import FastAPI

from tests.unit.cluster.fakes import MODEL
from tests.unit.cluster.instant_cluster import CONTEXT_LENGTH, InstantCluster, call_app

NUM_BEFORE = 1_000
CONCURRENCY = 24  # more than the router lets in, so that some requests are turned away
MARKER = "zq"
"""A marker in every value that a client invents."""

Call = tuple[str, str, bytes, dict[str, str]]


@pytest.fixture
async def cluster() -> AsyncIterator[InstantCluster]:
    running = InstantCluster()
    yield running
    await running.stop()


def calls(seed: int) -> Iterator[Call]:
    """An endless series of requests of all kinds in turn, no two with the same content."""
    rng = random.Random(seed)
    for number in itertools.count():
        word = f"{MARKER}{rng.getrandbits(40):x}"
        yield kind_of_call(number % 20, word, rng)


def kind_of_call(kind: int, word: str, rng: random.Random) -> Call:
    good = {"model": MODEL, "prompt": word, "max_tokens": rng.randint(1, 4)}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": word}], "max_tokens": 2}

    def post(path: str, body: object, **headers: str) -> Call:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return "POST", path, content, headers

    completions = "/v1/completions"
    table: list[Call] = [
        post(completions, good),
        post(completions, {**good, "stream": True}),
        post("/v1/chat/completions", chat),
        post(completions, {**good, "n": 2}, **{"X-Request-Id": word}),
        post(completions, {**good, "model": word}),
        post(completions, {**good, word: 1}),
        post(completions, {**good, "speculation": {"method": word}}),
        post(completions, {**good, "max_tokens": word}),
        post(completions, {**good, "service_tier": word}),
        post(completions, good, **{"X-Baton-SLO-Class": word}),
        post(completions, {**good, "prompt": word * CONTEXT_LENGTH}),
        post(completions, word.encode()),
        post(completions, good, **{"content-type": f"text/{word}"}),
        post(f"/{word}/{word}", good),
        post(f"{completions}?{word}={word}", good, **{"X-Request-Id": f"no valid id {word}"}),
        (word.upper(), completions, b"", {}),
        ("GET", f"/v1/models/{word}/{word}", b"", {}),
        ("GET", f"/v1/requests/{word}/timeline", b"", {}),
        post("/admin/scale", {word: 1}),
        ("GET", "/metrics", b"", {}),
    ]
    return table[kind]


async def drive(app: FastAPI, source: Iterator[Call], count: int) -> Counter[int]:
    """``count`` requests, some of them at once; how often each status came."""
    statuses: Counter[int] = Counter()
    todo = itertools.islice(source, count)

    async def client() -> None:
        for method, path, body, headers in todo:
            statuses[await call_app(app, method, path, body, headers)] += 1

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return statuses


def series(cluster: InstantCluster) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    return {
        (sample.name, frozenset(sample.labels.items()))
        for family in cluster.metrics.registry.collect()
        for sample in family.samples
    }


async def test_label_sets_stay_bounded_after_thousands_of_requests(cluster: InstantCluster, thorough: bool) -> None:
    app = await cluster.start()
    source = calls(seed=7)
    await drive(app, source, NUM_BEFORE)
    before = series(cluster)
    statuses = await drive(app, source, 9_000 if thorough else 1_000)
    after = series(cluster)

    assert before <= after
    # A status that is rare may show late, and adds a series; a kind of request that adds one would add fifty.
    assert len(after - before) <= 5, after - before
    assert len(after) < 1000
    assert not [name for name in after if MARKER in str(name).lower()]
    assert {200, 400, 404, 405, 429} <= statuses.keys(), statuses
    registry = cluster.metrics.registry
    for name, labels in (
        ("baton_requests_total", {"outcome": "length"}),
        ("baton_requests_total", {"outcome": "rejected"}),
        ("baton_retries_total", {"reason": "worker_lost"}),
        ("baton_retries_total", {"reason": "kv_transfer_failed"}),
        ("baton_kv_transfers_total", {"outcome": "failed"}),
        ("baton_local_prefills_total", {"reason": "recovery"}),
        ("baton_rejections_total", {"reason": "model_not_found"}),
        ("baton_rejections_total", {"reason": "overloaded"}),
    ):
        assert (registry.get_sample_value(name, labels) or 0) > 0, (name, labels)
