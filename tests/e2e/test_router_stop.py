"""A cluster that stops while it serves."""

from __future__ import annotations

import asyncio
import json

import httpx

from cluster.config.config import BatonConfig
from tests.e2e.conftest import start
from tests.running_cluster import MODEL

SETTINGS = {"simulation": {"profile": "h100-8b", "workers_per_process": 2}, "router": {"port": 0}}


def test_stopping_the_cluster_ends_running_requests_with_an_error() -> None:
    """Neither a stream nor a whole answer is cut off without an error."""
    config = BatonConfig.from_dict(SETTINGS)
    cluster = start(config)
    body = {"model": MODEL, "prompt": "On and on", "max_tokens": 4000, "ignore_eos": True}

    async def stream(http: httpx.AsyncClient, has_begun: asyncio.Event) -> list[str]:
        lines = []
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                has_begun.set()
                lines += [line] if line else []
        return lines

    async def ask_and_stop() -> tuple[list[str], httpx.Response]:
        async with httpx.AsyncClient(base_url=cluster.endpoint, timeout=60) as http:
            has_begun = asyncio.Event()
            streamed = asyncio.create_task(stream(http, has_begun))
            whole = asyncio.create_task(http.post("/v1/completions", json=body))
            await has_begun.wait()
            await asyncio.to_thread(cluster.stop)
            return await streamed, await whole

    try:
        lines, answer = asyncio.run(ask_and_stop())
    finally:
        cluster.stop()
    assert len(lines) > 2
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["reason"] == "stopping"
    assert answer.status_code == 429
    assert answer.json()["error"]["reason"] == "stopping"
