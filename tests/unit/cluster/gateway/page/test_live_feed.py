"""Live figures: one snapshot for all readers, and none without."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.types import Message

from baton.core.errors import ControllerLostError, EndpointFullError
from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.page.live_feed import LiveFeed, LiveResponse
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import FakeAdmin, FakeGenerator, say, serve
from tests.waiting import TIMEOUT_S, until

TOKENIZER = byte_level_tokenizer()


@dataclass
class CountingView:
    """Counts the snapshots that were asked for, and fails those in ``failures``."""

    num_asked: int = 0
    failures: set[int] = field(default_factory=set)

    async def status(self) -> dict[str, Any]:
        self.num_asked += 1
        if self.num_asked in self.failures:
            raise ControllerLostError("The controller is lost.")
        return {"number": self.num_asked}

    async def plan(self) -> dict[str, Any]:
        return {}

    async def requests(self, order: str, limit: int) -> list[dict[str, Any]]:
        return [{"order": order}]


def parsed(event: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return found


async def read(feed: LiveFeed, count: int) -> list[bytes]:
    async with feed.reading() as snapshots:
        return [await anext(snapshots) for _ in range(count)]


async def test_all_readers_get_the_same_bytes_of_one_snapshot() -> None:
    view = CountingView()
    feed = LiveFeed(view, interval_s=0.02)
    async with contextlib.AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(feed.reading()) for _ in range(10)]
        first = [await anext(reader) for reader in readers]
        second = [await anext(reader) for reader in readers]
    assert all(snapshot is first[0] for snapshot in first)
    assert all(snapshot is second[0] for snapshot in second)
    assert parsed(first[0])["status"] == {"number": 1}
    assert parsed(first[0])["slow_requests"] == [{"order": "slowest"}]


async def test_without_readers_nothing_is_asked() -> None:
    view = CountingView()
    feed = LiveFeed(view, interval_s=0.005)
    await asyncio.sleep(0.03)
    assert view.num_asked == 0
    await read(feed, 2)
    asked = view.num_asked
    await asyncio.sleep(0.03)
    assert view.num_asked == asked
    await read(feed, 1)
    assert view.num_asked == asked + 1  # a new reader gets a new snapshot, not the last one of long ago


async def test_a_slow_reader_skips_what_it_missed() -> None:
    view = CountingView()
    feed = LiveFeed(view, interval_s=0.001)
    async with feed.reading() as snapshots:
        await anext(snapshots)
        await until(lambda: view.num_asked > 20)
        assert parsed(await anext(snapshots))["status"]["number"] >= 20


async def test_a_failed_snapshot_is_told_and_the_next_one_follows() -> None:
    feed = LiveFeed(CountingView(failures={1}), interval_s=0.001)
    first, second = await read(feed, 2)
    assert parsed(first)["error"]["message"] == "The controller is lost."
    assert parsed(second)["status"] == {"number": 2}


async def test_too_many_readers_are_refused() -> None:
    feed = LiveFeed(CountingView(), max_readers=1)
    async with feed.reading():
        with pytest.raises(EndpointFullError, match="is the limit"):
            await feed.reading().__aenter__()
    async with feed.reading():
        pass


async def test_closing_ends_all_readers() -> None:
    feed = LiveFeed(CountingView(), interval_s=60)
    async with feed.reading() as snapshots:
        await anext(snapshots)
        waiting = asyncio.ensure_future(anext(snapshots, None))
        await asyncio.sleep(0)
        feed.close()
        assert await waiting is None


async def test_a_client_that_does_not_read_is_dropped() -> None:
    feed = LiveFeed(CountingView(), interval_s=0.001)
    sent: list[str] = []

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if len(sent) > 3:
            await asyncio.Event().wait()  # the connection's buffer is full

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    response = LiveResponse(feed, lambda: True, None, send_timeout_s=0.05)
    await asyncio.wait_for(response({"type": "http"}, receive, send), TIMEOUT_S)
    assert len(sent) == 4


async def test_a_key_that_is_removed_reads_no_more() -> None:
    feed = LiveFeed(CountingView(), interval_s=0.01)
    keys = ApiKeys([ApiKeyConfig(name="admin", key="an-admin-key-16-chars", admin=True)])
    generator = FakeGenerator(TOKENIZER, say(TOKENIZER, "hi"))
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(), api_keys=keys, live=feed)
    headers = {"Authorization": "Bearer an-admin-key-16-chars"}
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=headers) as http:
        async with http.stream("GET", "/admin/live") as endless:
            snapshots = endless.aiter_bytes()
            await anext(snapshots)
            keys.become(ApiKeys([ApiKeyConfig(name="admin", key="another-key-of-16-chars", admin=True)]))
            async for _ in snapshots:
                pass
        assert (await http.get("/admin/live")).status_code == 401


async def test_snapshots_are_streamed_and_counted() -> None:
    view = CountingView()
    feed = LiveFeed(view, interval_s=0.01)
    generator = FakeGenerator(TOKENIZER, say(TOKENIZER, "hi"))
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(), live=feed)
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        answer = await http.get("/admin/live?snapshots=3")
        wrong = await http.get("/admin/live?snapshots=0")
        async with http.stream("GET", "/admin/live") as endless:
            await anext(endless.aiter_bytes())
        await until(lambda: feed._making is None)  # the client has left
    assert answer.headers["content-type"].startswith("text/event-stream")
    numbers = [parsed(event.encode())["status"]["number"] for event in answer.text.split("\n\n") if event]
    assert len(numbers) == 3
    assert numbers == sorted(set(numbers))
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "snapshots")
