"""The block pool against a model of it, under any order of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from baton.core.errors import OutOfBlocksError
from baton.engine.kv_cache.block_pool import BlockPool

NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """A reference model: the holders of each block, and the content that can still be found."""

    holders = Bundle("holders")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, on_evict=self.evicted.append)
        self.held: dict[int, list[int]] = {}
        self.leased: dict[str, list[int]] = {}
        self.cached: set[int] = set()
        self.next_id = 0

    def references(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in (*self.held.values(), *self.leased.values()))

    def in_use(self) -> set[int]:
        return {block for block in range(NUM_BLOCKS) if self.references(block)}

    def new_holder(self, blocks: list[int]) -> int:
        self.next_id += 1
        self.held[self.next_id] = blocks
        return self.next_id

    @rule(target=holders, count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> object:
        free = NUM_BLOCKS - len(self.in_use())
        if count > free:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return multiple()
        uncached_free = set(range(NUM_BLOCKS)) - self.in_use() - self.cached
        self.evicted.clear()
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & self.in_use(), "a block in use was handed out again"
        assert set(self.evicted) == set(blocks) & self.cached
        if set(blocks) & self.cached:
            assert uncached_free <= set(blocks), "content was evicted while empty blocks were free"
        self.cached -= set(blocks)
        return self.new_holder(blocks)

    @rule(target=holders, holder=holders)
    def share(self, holder: int) -> object:
        if holder not in self.held:
            return multiple()
        self.pool.share(self.held[holder])
        return self.new_holder(list(self.held[holder]))

    @rule(target=holders, data=st.data())
    def share_cached(self, data: st.DataObject) -> object:
        if not self.cached:
            return multiple()
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True, min_size=1))
        self.pool.share(blocks)
        return self.new_holder(blocks)

    @rule(holder=holders, data=st.data())
    def mark_cached(self, holder: int, data: st.DataObject) -> None:
        if self.held.get(holder):
            block = data.draw(st.sampled_from(self.held[holder]))
            self.pool.mark_cached(block)
            self.cached.add(block)

    @rule(holder=consumes(holders))
    def release(self, holder: int) -> None:
        self.pool.release(self.held.pop(holder))

    @rule(target=leases, holder=holders)
    def lease(self, holder: int) -> object:
        if holder not in self.held:
            return multiple()
        self.next_id += 1
        lease_id = f"lease-{self.next_id}"
        self.pool.lease(lease_id, self.held[holder])
        self.leased[lease_id] = list(self.held[holder])
        return lease_id

    @rule(lease_id=leases)
    def end_lease(self, lease_id: str) -> None:
        """Ends a lease. If the lease has already ended, nothing must change."""
        self.pool.end_lease(lease_id)
        self.leased.pop(lease_id, None)

    @precondition(lambda self: len(self.in_use()) + len(self.cached) < NUM_BLOCKS)
    @rule()
    def an_empty_block_cannot_be_shared_or_released(self) -> None:
        block = min(set(range(NUM_BLOCKS)) - self.in_use() - self.cached, default=None)
        if block is None:
            return
        with pytest.raises(RuntimeError, match="holds no cached content"):
            self.pool.share([block])
        with pytest.raises(RuntimeError, match="released more often"):
            self.pool.release([block])

    @invariant()
    def books_agree(self) -> None:
        usage = self.pool.usage()
        in_use = self.in_use()
        assert usage.total == NUM_BLOCKS
        assert usage.used == len(in_use)
        assert usage.cached == len(self.cached - in_use)
        assert usage.used + usage.cached + usage.free == usage.total
        assert self.pool.num_free == NUM_BLOCKS - len(in_use)
        assert [self.pool.ref_count(block) for block in range(NUM_BLOCKS)] == [
            self.references(block) for block in range(NUM_BLOCKS)
        ]
        assert self.pool.leases == self.leased
        assert self.pool.check(self.held.values()) == []


PoolMachine.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def test_check_names_leaks_and_missing_references() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    assert pool.check([[first, second]]) == []
    assert pool.check([[first]]) == [f"block {second}: 1 references, 0 known holders"]
    assert len(pool.check([[first, second], [first]])) == 1


def test_the_oldest_content_is_evicted_first_and_sequence_ends_before_starts() -> None:
    evicted: list[int] = []
    pool = BlockPool(6, on_evict=evicted.append)
    old, recent = pool.allocate(2), pool.allocate(2)
    for block in (*old, *recent):
        pool.mark_cached(block)
    pool.release(old)
    pool.release(recent)
    pool.allocate(2)
    assert evicted == [], "the two blocks that never held anything go first"
    pool.allocate(4)
    assert evicted == [old[1], old[0], recent[1], recent[0]]


def test_reusing_content_makes_it_recent() -> None:
    evicted: list[int] = []
    pool = BlockPool(2, on_evict=evicted.append)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.mark_cached(block)
        pool.release([block])
    pool.share([first])
    pool.release([first])
    pool.allocate(2)
    assert evicted == [second, first]


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="2 KV blocks were needed but only 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_lease_outlives_its_request_and_has_a_unique_id() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.lease("transfer", blocks)
    with pytest.raises(RuntimeError, match="already exists"):
        pool.lease("transfer", blocks)
    pool.release(blocks)
    assert pool.num_free == 0
    pool.end_lease("transfer")
    assert pool.num_free == 2


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
