"""How a worker's ranks share things."""

from __future__ import annotations

MAX_RANKS = 64


def share_of(count: int, rank: int, size: int) -> range:
    """A rank's share of ``count`` things: as many as the others', the first ranks one more.

    With fewer things than ranks, several ranks share one.
    """
    if size > count:
        first = rank * count // size
        return range(first, first + 1)
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))
