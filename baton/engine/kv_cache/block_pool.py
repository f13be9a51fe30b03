"""Ownership of KV blocks. Ids and counts only; the tensors are in ``paged_cache.py``.

ref_count > 0   held by requests, leases or reservations
ref_count = 0   on the free list, oldest first; its content may still be cached, and ``share`` can take it back
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.core.errors import OutOfBlocksError


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """A pool's blocks by state; ``used + cached + free = total``."""

    total: int
    used: int
    cached: int
    free: int


class BlockPool:
    """Reference-counted blocks with a free list in eviction order.

    Args:
        num_blocks: size of the pool.
            on_evict: called with a block's id just before its cached content is evicted.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: set[int] = set()
        self._leases: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out, cached or not."""
        return len(self._free)

    @property
    def leases(self) -> dict[str, list[int]]:
        """Lease id → blocks, as a copy."""
        return {lease_id: list(blocks) for lease_id, blocks in self._leases.items()}

    def usage(self) -> BlockUsage:
        cached = sum(1 for block in self._cached if self._ref_counts[block] == 0)
        free = len(self._free)
        return BlockUsage(self.num_blocks, self.num_blocks - free, cached, free - cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Returns ``count`` blocks with one reference each; evicts the least recently used content first.

        Raises:
            OutOfBlocksError: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfBlocksError(
                f"{count} KV blocks were needed but only {len(self._free)} of {self.num_blocks} are free."
            )
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block in self._cached:
                self._cached.discard(block)
                if self._on_evict is not None:
                    self._on_evict(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that hold content, free ones with cached content included."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                if block not in self._cached:
                    raise RuntimeError(f"block {block} is free and holds no cached content")
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference. Uncached blocks are reused first, then later blocks of a sequence before earlier ones."""
        for block in reversed(blocks):
            if self._ref_counts[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._cached:
                    self._free.move_to_end(block, last=False)

    def mark_cached(self, block: int) -> None:
        """Marks a block whose content can be found by its hash; once free, it is kept as long as possible."""
        self._cached.add(block)

    def unmark_cached(self, block: int) -> None:
        """Marks a block whose content must not be found any more. Call it while the block is held."""
        self._cached.discard(block)

    def lease(self, lease_id: str, blocks: Sequence[int]) -> None:
        """Keeps blocks readable for a hand-off after their request ends, until ``end_lease``."""
        if lease_id in self._leases:
            raise RuntimeError(f"lease {lease_id} already exists")
        self.share(blocks)
        self._leases[lease_id] = list(blocks)

    def end_lease(self, lease_id: str) -> None:
        """Releases a lease's blocks; does nothing for a lease that has ended, so that every path may end it."""
        blocks = self._leases.pop(lease_id, None)
        if blocks is not None:
            self.release(blocks)

    def check(self, held: Iterable[Sequence[int]] = ()) -> list[str]:
        """Compares the reference counts with the leases and the block lists in ``held``.

        Returns:
            One sentence for each inconsistency; empty when every block is accounted for.
        """
        expected = [0] * self.num_blocks
        for blocks in (*held, *self._leases.values()):
            for block in blocks:
                expected[block] += 1
        problems = [
            f"block {block}: {count} references, {expected[block]} known holders"
            for block, count in enumerate(self._ref_counts)
            if count != expected[block]
        ]
        on_free_list = set(self._free)
        problems.extend(
            f"block {block}: {'on' if block in on_free_list else 'missing from'} the free list with {count} references"
            for block, count in enumerate(self._ref_counts)
            if (count == 0) != (block in on_free_list)
        )
        return problems
