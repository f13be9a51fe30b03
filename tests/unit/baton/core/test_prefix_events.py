"""Slow readers of prefix-cache events still learn the exact content, at a bounded cost in memory."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, aclosing

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core import prefix_events
from baton.core.prefix_events import CacheChanges, PrefixEvents, PrefixReader, watch
from baton.engine.kv_cache.prefix_cache import PrefixCache
from tests.waiting import TIMEOUT_S

PAUSE_S = 0.001


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Copy:
    """A reader's state after the events that it received."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.num_snapshots = 0

    def take(self, changes: CacheChanges) -> None:
        if changes.is_snapshot:
            self.hashes.clear()
            self.num_snapshots += 1
        stored, evicted = set(changes.stored), set(changes.evicted)
        assert len(stored) == len(changes.stored)
        assert len(evicted) == len(changes.evicted)
        assert not stored & self.hashes  # only news
        assert evicted <= self.hashes
        self.hashes |= stored
        self.hashes -= evicted


class Follower:
    """A reader with its copy."""

    def __init__(self, events: PrefixEvents, stack: ExitStack) -> None:
        self.num_woken = 0
        self.copy = Copy()
        self.reader: PrefixReader = stack.enter_context(events.reader(self._wake))
        self.has_looked = False

    def _wake(self) -> None:
        self.num_woken += 1

    def look(self) -> None:
        self.num_woken, self.has_looked = 0, True
        changes = self.reader.take()
        if changes is not None:
            self.copy.take(changes)


class Feed(RuleBasedStateMachine):
    """A cache of six blocks that hold any of a dozen contents, one reader that always looks, and others that may."""

    blocks = st.integers(0, 5)
    contents = st.integers(0, 11)

    @initialize()
    def begin(self) -> None:
        self.limit_before = prefix_events._SNAPSHOT_ABOVE
        prefix_events._SNAPSHOT_ABOVE = 3  # so that small caches need snapshots too
        self.stack = ExitStack()
        self.cache = PrefixCache(1)
        self.content: dict[int, bytes] = {}
        self.fast = Follower(self.cache.events, self.stack)
        self.slow: list[Follower] = []

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()
            prefix_events._SNAPSHOT_ABOVE = self.limit_before

    @rule(block=blocks, content=contents)
    def store(self, block: int, content: int) -> None:
        self.cache.forget(block)
        self.content.pop(block, None)
        if self.cache.insert(name(content), None, [content], block):
            self.content[block] = name(content)

    @rule(block=blocks)
    def evict(self, block: int) -> None:
        self.cache.forget(block)
        self.content.pop(block, None)

    @precondition(lambda self: len(self.slow) < 3)
    @rule()
    def open(self) -> None:
        self.slow.append(Follower(self.cache.events, self.stack))

    @precondition(lambda self: self.slow)
    @rule(index=st.integers(0, 2))
    def look(self, index: int) -> None:
        follower = self.slow[index % len(self.slow)]
        follower.look()
        assert follower.copy.hashes == set(self.content.values())

    @invariant()
    def a_fast_reader_is_up_to_date(self) -> None:
        if not hasattr(self, "fast"):
            return
        self.fast.look()
        assert self.fast.copy.hashes == set(self.content.values())

    @invariant()
    def slow_readers_hold_few_events(self) -> None:
        for follower in getattr(self, "slow", ()):
            assert follower.reader.num_waiting <= 6

    @invariant()
    def a_reader_with_events_was_woken_once(self) -> None:
        for follower in getattr(self, "slow", ()):
            assert follower.num_woken <= 1
            if follower.reader.num_waiting:
                assert follower.num_woken == 1 or not follower.has_looked


Feed.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFeed = Feed.TestCase


def test_a_block_added_and_removed_between_reads_is_not_reported() -> None:
    events = PrefixEvents()
    with ExitStack() as stack:
        follower = Follower(events, stack)
        follower.look()
        events.stored(name(1))
        events.evicted(name(1))
        assert follower.reader.take() is None
        events.stored(name(1))
        follower.look()
        events.evicted(name(1))
        events.stored(name(1))
        assert follower.reader.take() is None


def test_only_a_reader_that_fell_behind_gets_a_snapshot() -> None:
    events = PrefixEvents()
    with ExitStack() as stack:
        slow, fast = Follower(events, stack), Follower(events, stack)
        for number in range(500):
            events.stored(name(number))
        slow.look()
        for number in range(500, 3000):
            events.stored(name(number))
            events.evicted(name(number - 500))
            fast.look()
            assert slow.reader.num_waiting <= prefix_events._SNAPSHOT_ABOVE
        slow.look()
        assert slow.copy.hashes == fast.copy.hashes == {name(number) for number in range(2500, 3000)}
        assert slow.copy.num_snapshots == 1  # 500 left and 500 came: the rest cancelled out
        for number in range(3000, 8000):
            events.stored(name(number))
            fast.look()
        slow.look()
        assert slow.copy.hashes == fast.copy.hashes
        assert (slow.copy.num_snapshots, fast.copy.num_snapshots) == (1, 1)
        for number in range(2500, 8000):
            events.evicted(name(number))
            fast.look()
        assert slow.reader.num_waiting == 0
        slow.look()
        assert slow.copy.hashes == fast.copy.hashes == set()
        assert (slow.copy.num_snapshots, fast.copy.num_snapshots) == (2, 1)


def test_a_closed_reader_costs_nothing() -> None:
    events = PrefixEvents()
    with ExitStack() as stack:
        follower = Follower(events, stack)
        follower.look()
    events.stored(name(1))
    assert follower.num_woken == 0
    assert follower.reader.num_waiting == 0


def test_snapshots_keep_the_order_of_arrival() -> None:
    events = PrefixEvents()
    for number in (3, 1, 2):
        events.stored(name(number))
    with events.reader(lambda: None) as reader:
        assert reader.take() == CacheChanges((name(3), name(1), name(2)), is_snapshot=True)


async def test_a_watcher_follows_a_writing_thread() -> None:
    events, copy, rounds = PrefixEvents(), Copy(), 20_000

    def write() -> None:
        for number in range(rounds):
            events.stored(name(number))
            if number % 3:  # of three, the first stays for a while, the second leaves at once, the third stays
                events.evicted(name(number - 2 if number % 3 == 2 else number))
        events.stored(name(rounds))

    writer = threading.Thread(target=write)
    async with asyncio.timeout(TIMEOUT_S), aclosing(watch(events, PAUSE_S)) as deliveries:
        copy.take(await anext(deliveries))
        writer.start()
        async for changes in deliveries:
            copy.take(changes)
            if name(rounds) in copy.hashes:
                break
    writer.join()
    with events.reader(lambda: None) as reader:
        final = reader.take()
    assert final is not None
    assert copy.hashes == set(final.stored)


async def test_a_watcher_batches_events_and_is_silent_otherwise() -> None:
    events = PrefixEvents()
    events.stored(name(0))
    async with asyncio.timeout(TIMEOUT_S), aclosing(watch(events, PAUSE_S)) as deliveries:
        assert await anext(deliveries) == CacheChanges((name(0),), is_snapshot=True)
        following = asyncio.ensure_future(anext(deliveries))
        await asyncio.sleep(5 * PAUSE_S)
        assert not following.done()
        events.stored(name(1))
        events.stored(name(2))
        events.evicted(name(0))
        assert await following == CacheChanges((name(1), name(2)), (name(0),))
        following = asyncio.ensure_future(anext(deliveries))
        await asyncio.sleep(0)
        events.stored(name(3))
        events.evicted(name(3))
        await asyncio.sleep(5 * PAUSE_S)
        assert not following.done()
        events.evicted(name(1))
        assert await following == CacheChanges((), (name(1),))


async def test_closing_a_watcher_removes_it() -> None:
    events = PrefixEvents()
    async with aclosing(watch(events)) as deliveries:
        await anext(deliveries)
        assert len(events._readers) == 1
    assert events._readers == []
