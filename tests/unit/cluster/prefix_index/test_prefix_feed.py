"""One stream of cache events a worker: begun with it, opened again when it breaks, ended with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from baton.core.errors import BatonError, InternalError, WorkerLostError
from baton.core.prefix_events import CacheChanges
from baton.rpc.cache_messages import pack_cache_changes
from baton.rpc.wire import worker_pb2
from cluster.prefix_index.prefix_feed import PrefixFeed
from cluster.prefix_index.prefix_index import PrefixIndex, prompt_hashes
from cluster.registry import worker_streams
from cluster.registry.workers import Worker
from cluster.telemetry.metrics import RouterMetrics
from tests.waiting import until
from tests.worker_infos import make_info

SIZE = 16
PROMPT = tuple(range(3 * SIZE + 1))
HASHES = prompt_hashes(PROMPT, SIZE).blocks

Said = worker_pb2.CacheEvents | BatonError | None


class TalkingClient:
    """Stands for :class:`cluster.registry.worker_client.WorkerClient`. None ends a stream."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.num_open = 0
        self._says: asyncio.Queue[Said] = asyncio.Queue()

    def say(self, *stored: bytes, evicted: tuple[bytes, ...] = (), snapshot: bool = False) -> None:
        for message in pack_cache_changes(CacheChanges(stored, evicted, snapshot)):
            self._says.put_nowait(message)

    def say_raw(self, said: Said) -> None:
        self._says.put_nowait(said)

    async def watch_cache(self) -> AsyncGenerator[worker_pb2.CacheEvents]:
        self.num_streams += 1
        self.num_open += 1
        try:
            while (said := await self._says.get()) is not None:
                if isinstance(said, BatonError):
                    raise said
                yield said
        finally:
            self.num_open -= 1


def worker_with(client: TalkingClient, worker_id: str = "p1", **changes: object) -> Worker:
    return Worker(make_info(worker_id, "prefill", block_size=SIZE, **changes), client)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_streams, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(worker_streams, "_MAX_PAUSE_S", 0.002)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(SIZE)


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics()


@pytest.fixture
async def feed(index: PrefixIndex, metrics: RouterMetrics) -> AsyncIterator[PrefixFeed]:
    feed = PrefixFeed(index, metrics.prefixes)
    yield feed
    await feed.close()


def cached(index: PrefixIndex, worker_id: str = "p1") -> int:
    return index.cached_tokens([worker_id], PROMPT)[worker_id]


async def test_events_of_a_worker_reach_the_index(feed: PrefixFeed, index: PrefixIndex) -> None:
    client = TalkingClient()
    feed.add(worker_with(client))
    client.say(*HASHES[:1], snapshot=True)
    await until(lambda: cached(index) == SIZE)
    client.say(*HASHES[1:])
    await until(lambda: cached(index) == 3 * SIZE)
    client.say(evicted=HASHES[2:])
    await until(lambda: cached(index) == 2 * SIZE)


async def test_adding_a_worker_twice_opens_one_stream(feed: PrefixFeed) -> None:
    client = TalkingClient()
    worker = worker_with(client)
    feed.add(worker)
    feed.add(worker)
    await until(lambda: client.num_open > 0)
    assert client.num_streams == 1


async def test_a_broken_stream_is_reopened_and_the_index_is_kept_meanwhile(
    feed: PrefixFeed, index: PrefixIndex
) -> None:
    client = TalkingClient()
    feed.add(worker_with(client))
    for broken in (WorkerLostError("the connection broke"), None):
        client.say(*HASHES, snapshot=True)
        await until(lambda: cached(index) == 3 * SIZE)
        before = client.num_streams
        client.say_raw(broken)
        await until(lambda before=before: client.num_streams > before)
        assert cached(index) == 3 * SIZE
    client.say(*HASHES[:1], snapshot=True)
    await until(lambda: cached(index) == SIZE)


async def test_a_worker_silent_after_a_break_is_eventually_forgotten(feed: PrefixFeed, index: PrefixIndex) -> None:
    client = TalkingClient()
    feed.add(worker_with(client))
    client.say(*HASHES, snapshot=True)
    await until(lambda: cached(index) == 3 * SIZE)
    client.say_raw(WorkerLostError("the connection broke"))
    client.say_raw(WorkerLostError("nobody there"))
    await until(lambda: cached(index) == 0)


async def test_a_worker_without_a_stream_is_warned_about_once_and_polled_again(
    feed: PrefixFeed, index: PrefixIndex, caplog: pytest.LogCaptureFixture
) -> None:
    client = TalkingClient()
    feed.add(worker_with(client))
    for _ in range(10):
        client.say_raw(InternalError("Method not found!"))
    await until(lambda: client.num_streams > 10)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in warnings] == ["a stream of prefix cache events broke: Method not found!"]
    client.say(*HASHES, snapshot=True)
    await until(lambda: cached(index) == 3 * SIZE)


async def test_a_worker_that_fails_for_hours_is_still_polled(
    feed: PrefixFeed, index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More failures in a row than a float has powers of two."""
    monkeypatch.setattr(worker_streams, "_MAX_PAUSE_S", 0.0)
    client = TalkingClient()
    feed.add(worker_with(client))
    for _ in range(1100):
        client.say_raw(InternalError("Method not found!"))
    client.say(*HASHES, snapshot=True)
    await until(lambda: cached(index) == 3 * SIZE)


@pytest.mark.parametrize(
    "nonsense",
    [
        worker_pb2.CacheEvents(stored=b"x" * 17),
        worker_pb2.CacheEvents(stored=b"".join(number.to_bytes(16, "big") for number in range(6))),
    ],
    ids=["cut off", "more than its cache can hold"],
)
async def test_a_worker_that_sends_invalid_events_is_reconnected(
    feed: PrefixFeed, index: PrefixIndex, nonsense: worker_pb2.CacheEvents
) -> None:
    client = TalkingClient()
    feed.add(worker_with(client, kv_blocks=5))
    client.say(*HASHES, snapshot=True)
    client.say_raw(nonsense)
    await until(lambda: client.num_streams == 2)
    assert index.num_blocks("p1") == 0
    client.say(*HASHES, snapshot=True)
    await until(lambda: cached(index) == 3 * SIZE)


async def test_a_removed_worker_is_forgotten_and_its_stream_ends(feed: PrefixFeed, index: PrefixIndex) -> None:
    client, other = TalkingClient(), TalkingClient()
    feed.add(worker_with(client))
    feed.add(worker_with(other, "p2"))
    for talking in (client, other):
        talking.say(*HASHES, snapshot=True)
    await until(lambda: index.sizes() == {"p1": 3, "p2": 3})
    feed.remove("p1")
    assert index.cached_tokens(["p1", "p2"], PROMPT) == {"p1": 0, "p2": 3 * SIZE}
    await until(lambda: client.num_open == 0)
    assert (client.num_streams, other.num_open) == (1, 1)
    feed.remove("p1")  # nothing happens
    feed.add(worker_with(client))
    client.say(*HASHES[:1], snapshot=True)
    await until(lambda: cached(index) == SIZE)


async def test_blocks_of_another_size_are_refused_with_an_error(
    feed: PrefixFeed, index: PrefixIndex, caplog: pytest.LogCaptureFixture
) -> None:
    client = TalkingClient()
    worker = worker_with(client)
    odd = Worker(make_info("odd", "prefill", block_size=32), client)  # type: ignore[arg-type]
    feed.add(odd)
    assert "KV blocks have 32 tokens on this worker and 16 on others" in caplog.text
    feed.add(worker)
    client.say(*HASHES, snapshot=True)
    await until(lambda: cached(index) == 3 * SIZE)
    assert client.num_streams == 1
    assert cached(index, "odd") == 0
    feed.remove("odd")


async def test_closing_ends_every_stream(feed: PrefixFeed, index: PrefixIndex) -> None:
    clients = [TalkingClient() for _ in range(3)]
    for number, client in enumerate(clients):
        feed.add(worker_with(client, f"p{number}"))
        client.say(*HASHES, snapshot=True)
    await until(lambda: len(index.sizes()) == 3)
    await feed.close()
    assert [client.num_open for client in clients] == [0, 0, 0]
    assert index.sizes() == {}


async def test_events_and_failures_are_counted(feed: PrefixFeed, metrics: RouterMetrics, index: PrefixIndex) -> None:
    client = TalkingClient()
    assert "baton_prefix_stream_restarts_total 0.0" in metrics.render().decode()
    feed.add(worker_with(client))
    client.say(*HASHES, snapshot=True)
    client.say(evicted=HASHES[:2])
    await until(lambda: index.sizes() == {"p1": 1})
    client.say_raw(None)
    await until(lambda: client.num_streams == 2)
    page = metrics.render().decode().splitlines()
    for line in (
        'baton_prefix_known_blocks{worker="p1"} 1.0',
        'baton_prefix_events_total{kind="stored"} 3.0',
        'baton_prefix_events_total{kind="evicted"} 2.0',
        "baton_prefix_snapshots_total 1.0",
        "baton_prefix_stream_restarts_total 1.0",
    ):
        assert line in page
    feed.remove("p1")
    assert 'worker="p1"' not in metrics.render().decode()
