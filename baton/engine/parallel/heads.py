"""Which attention heads a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.ranks import share_of


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of one attention layer, over all ranks."""

    num_heads: int
    num_kv_heads: int

    def can_split(self, size: int) -> bool:
        """Whether each of ``size`` ranks gets whole heads, with the KV heads that they read."""
        if size <= self.num_kv_heads:
            return True
        return size % self.num_kv_heads == 0 and self.num_heads % size == 0

    def kv_of(self, rank: int, size: int) -> range:
        """The KV heads of a rank; ranks share one where there are fewer heads than ranks."""
        return share_of(self.num_kv_heads, rank, size)

    def of(self, rank: int, size: int) -> range:
        """The query heads of a rank: those that read its KV heads."""
        if size > self.num_kv_heads:
            count = self.num_heads // size
            return range(rank * count, (rank + 1) * count)
        per_kv_head = self.num_heads // self.num_kv_heads
        kv = self.kv_of(rank, size)
        return range(kv.start * per_kv_head, kv.stop * per_kv_head)
