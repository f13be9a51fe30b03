"""The index holds exactly the blocks that workers reported and those in transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core.prefix_events import CacheChanges
from baton.rpc.cache_messages import pack_cache_changes, unpack_hashes
from baton.rpc.wire import worker_pb2
from cluster.prefix_index import prefix_index
from cluster.prefix_index.prefix_index import PrefixIndex, prompt_hashes
from tests.fake_clock import FakeClock

SIZE = 2
WORKERS = ("p1", "p2", "p3")
prompts = st.lists(st.integers(0, 1), max_size=11).map(tuple)


def hashes(prompt: Sequence[int]) -> tuple[bytes, ...]:
    return prompt_hashes(prompt, SIZE).blocks


def tell(
    index: PrefixIndex,
    worker_id: str,
    stored: Iterable[bytes] = (),
    evicted: Iterable[bytes] = (),
    *,
    snapshot: bool = False,
) -> None:
    for message in pack_cache_changes(CacheChanges(tuple(stored), tuple(evicted), snapshot)):
        index.apply(worker_id, message)


def held(content: set[bytes], prompt: Sequence[int]) -> int:
    """Block by block, as a worker looks."""
    depth = 0
    chain = hashes(prompt)
    while depth < len(chain) and chain[depth] in content and (depth + 1) * SIZE < len(prompt):
        depth += 1
    return depth * SIZE


class Index(RuleBasedStateMachine):
    """Against a set per worker, and a list of all that was ever expected."""

    workers = st.sampled_from(WORKERS)

    @initialize()
    def begin(self) -> None:
        self.limits = pytest.MonkeyPatch()
        self.limits.setattr(prefix_index, "_SWEEP_BLOCKS", 2)
        self.clock = FakeClock()
        self.index = PrefixIndex(SIZE, self.clock)
        self.contents: dict[str, set[bytes]] = {}
        self.expected: dict[str, dict[bytes, float]] = {}

    @rule(worker=workers, prompt=prompts, count=st.integers(0, 5))
    def store(self, worker: str, prompt: tuple[int, ...], count: int) -> None:
        self._tell(worker, stored=hashes(prompt)[count:])

    @rule(worker=workers, prompt=prompts, count=st.integers(0, 5))
    def evict(self, worker: str, prompt: tuple[int, ...], count: int) -> None:
        self._tell(worker, evicted=hashes(prompt)[count:])

    @rule(worker=workers, prompt=prompts)
    def snapshot(self, worker: str, prompt: tuple[int, ...]) -> None:
        self.contents[worker] = set()
        self._tell(worker, stored=hashes(prompt), snapshot=True)

    @rule(worker=workers)
    def remove(self, worker: str) -> None:
        self.index.remove(worker)
        self.contents.pop(worker, None)
        self.expected.pop(worker, None)

    @rule(worker=workers, prompt=prompts, seconds=st.sampled_from((0.5, 2.0)))
    def expect(self, worker: str, prompt: tuple[int, ...], seconds: float) -> None:
        until_s = self.clock() + seconds
        self.index.expect(worker, prompt, until_s)
        if worker in self.contents:
            untils = self.expected.setdefault(worker, {})
            for block_hash in set(hashes(prompt)) - self.contents[worker]:
                untils[block_hash] = max(until_s, untils.get(block_hash, 0.0))

    @rule(seconds=st.sampled_from((0.25, 1.0)))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(prompt=prompts)
    def ask(self, prompt: tuple[int, ...]) -> None:
        hoped = {worker: held(self._expected_hashes(worker), prompt) for worker in WORKERS}
        assert self.index.cached_tokens(WORKERS, prompt) == hoped

    @invariant()
    def only_present_blocks_are_stored(self) -> None:
        if not hasattr(self, "index"):
            return
        assert set(self.index._holders) == set().union(
            *self.contents.values(), *(cache.hashes for cache in self.index._void)
        )
        assert self.index.sizes() == {worker: len(content) for worker, content in self.contents.items()}
        masks = [cache.mask for cache in (*self.index._caches.values(), *self.index._void)]
        assert sum(masks) + sum(self.index._free_masks) == (1 << self.index._num_masks) - 1

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        self.limits.undo()
        self.clock.now_s += 10.0
        tell(self.index, "p1", snapshot=True)
        self.index.expect("p1", (), self.clock())
        assert self.index._expected == {}
        assert self.index._expiries == []
        for worker in WORKERS:
            self.index.remove(worker)
        for _ in range(len(self.index._void)):
            tell(self.index, "p1", snapshot=True)
        assert self.index._holders == {}

    def _tell(
        self, worker: str, stored: Sequence[bytes] = (), evicted: Sequence[bytes] = (), *, snapshot: bool = False
    ) -> None:
        tell(self.index, worker, stored, evicted, snapshot=snapshot)
        if stored or evicted or snapshot:
            self.contents.setdefault(worker, set())
            self.contents[worker] |= set(stored)
            self.contents[worker] -= set(evicted)
            for block_hash in stored:
                self.expected.get(worker, {}).pop(block_hash, None)

    def _expected_hashes(self, worker: str) -> set[bytes]:
        now_s = self.clock()
        coming = {block_hash for block_hash, until_s in self.expected.get(worker, {}).items() if until_s > now_s}
        return self.contents.get(worker, set()) | coming


Index.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestIndex = Index.TestCase

PROMPT = (1, 2, 3, 4, 5, 6, 7)


def test_one_token_is_always_computed() -> None:
    index = PrefixIndex(SIZE)
    tell(index, "p1", hashes(PROMPT), snapshot=True)
    assert index.cached_tokens(["p1"], PROMPT) == {"p1": 6}
    assert index.cached_tokens(["p1"], PROMPT[:6]) == {"p1": 4}
    assert index.cached_tokens(["p1"], PROMPT[:1]) == {"p1": 0}
    assert index.cached_tokens(["p1"], ()) == {"p1": 0}


def test_a_block_after_a_gap_does_not_count() -> None:
    index = PrefixIndex(SIZE)
    first, second, third = hashes(PROMPT)
    tell(index, "p1", (first, third), snapshot=True)
    tell(index, "p2", (second, third), snapshot=True)
    assert index.cached_tokens(WORKERS, PROMPT) == {"p1": 2, "p2": 0, "p3": 0}


def test_only_requested_workers_are_in_the_answer() -> None:
    index = PrefixIndex(SIZE)
    for worker in WORKERS:
        tell(index, worker, hashes(PROMPT), snapshot=True)
    assert index.cached_tokens(["p2", "stranger"], PROMPT) == {"p2": 6, "stranger": 0}
    assert index.cached_tokens([], PROMPT) == {}


def test_a_burst_with_a_common_prefix_stays_together() -> None:
    clock = FakeClock()
    index = PrefixIndex(SIZE, clock)
    for worker in WORKERS:
        tell(index, worker, snapshot=True)
    index.expect("p2", PROMPT, clock() + 5.0)
    longer = (*PROMPT, 8, 9, 10)
    assert index.cached_tokens(WORKERS, longer) == {"p1": 0, "p2": 6, "p3": 0}
    clock.now_s += 5.0  # the request failed
    assert index.cached_tokens(WORKERS, longer) == dict.fromkeys(WORKERS, 0)


def test_an_expected_block_that_arrived_and_left_is_no_longer_expected() -> None:
    index = PrefixIndex(SIZE, FakeClock())
    tell(index, "p1", snapshot=True)
    index.expect("p1", PROMPT, 1e9)
    tell(index, "p1", hashes(PROMPT))
    tell(index, "p1", evicted=hashes(PROMPT)[1:])
    assert index.cached_tokens(["p1"], PROMPT) == {"p1": 2}


def test_a_worker_that_reuses_a_bit_inherits_nothing() -> None:
    index = PrefixIndex(SIZE, FakeClock())
    tell(index, "p1", hashes(PROMPT)[:1], snapshot=True)
    index.expect("p1", PROMPT, 1e9)
    index.remove("p1")
    tell(index, "p9", snapshot=True)
    assert index.cached_tokens(["p1", "p9"], PROMPT) == {"p1": 0, "p9": 0}
    assert index._expiries == []


def test_a_large_cache_is_forgotten_at_once_and_swept_gradually(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "_SWEEP_BLOCKS", 10)
    index = PrefixIndex(SIZE)
    tell(index, "p1", (*hashes(PROMPT), *(number.to_bytes(16, "big") for number in range(97))), snapshot=True)
    tell(index, "p2", hashes(PROMPT)[:1], snapshot=True)
    index.remove("p1")
    assert index.cached_tokens(["p1", "p2"], PROMPT) == {"p1": 0, "p2": 2}
    assert index.sizes() == {"p2": 1}
    assert len(index._holders) in range(90, 93)  # the first block is another's too
    tell(index, "p1", hashes(PROMPT)[:2], snapshot=True)
    assert index.cached_tokens(["p1", "p2"], PROMPT) == {"p1": 4, "p2": 2}
    for _ in range(20):
        index.apply("p2", worker_pb2.CacheEvents())
    assert set(index._holders) == set(hashes(PROMPT)[:2])
    assert index._void == []


def test_more_workers_than_bits_in_a_machine_word_are_supported() -> None:
    index = PrefixIndex(SIZE)
    names = [f"p{number}" for number in range(100)]
    for number, worker in enumerate(names):
        tell(index, worker, hashes(PROMPT)[: number % 4], snapshot=True)
    assert index.cached_tokens(names, PROMPT) == {name: (number % 4) * SIZE for number, name in enumerate(names)}


def test_hashes_of_blocks_of_another_size_are_refused() -> None:
    index = PrefixIndex(SIZE)
    tell(index, "p1", hashes(PROMPT), snapshot=True)
    with pytest.raises(ValueError, match="blocks of 4 tokens, expected 2"):
        index.cached_tokens(["p1"], prompt_hashes(PROMPT, 4))
    assert index.cached_tokens(["p1"], prompt_hashes(PROMPT, SIZE)) == {"p1": 6}


def test_a_truncated_message_changes_nothing() -> None:
    index = PrefixIndex(SIZE)
    tell(index, "p1", hashes(PROMPT), snapshot=True)
    for broken in (
        worker_pb2.CacheEvents(is_snapshot=True, stored=b"x" * 17),
        worker_pb2.CacheEvents(stored=b"y" * 16, evicted=b"x" * 15),
    ):
        with pytest.raises(ValueError, match="not a multiple of"):
            index.apply("p1", broken)
    assert index.num_blocks("p1") == 3


@settings(deadline=None)
@given(stored=st.integers(0, 9000), evicted=st.integers(0, 5000), snapshot=st.booleans())
def test_messages_are_small_and_complete(stored: int, evicted: int, snapshot: bool) -> None:
    came = tuple(number.to_bytes(16, "big") for number in range(stored))
    left = () if snapshot else tuple(number.to_bytes(16, "big") for number in range(10_000, 10_000 + evicted))
    messages = list(pack_cache_changes(CacheChanges(came, left, snapshot)))
    assert all(message.ByteSize() < 70_000 for message in messages)
    assert [found for message in messages for found in unpack_hashes(message.stored)] == list(came)
    assert [found for message in messages for found in unpack_hashes(message.evicted)] == list(left)
    assert [message.is_snapshot for message in messages[:1]] == [snapshot] * bool(messages)
    assert not any(message.is_snapshot for message in messages[1:])
    assert bool(messages) == (snapshot or bool(came) or bool(left))
