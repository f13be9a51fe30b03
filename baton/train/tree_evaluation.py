"""How long the accepted paths are when guesses that do not depend on each other are verified as a tree."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeAcceptance:
    """
    Attributes:
        accuracies: by head and rank: how often this guess was what the target said.
        num_nodes: of the tree, which is the best one for these accuracies.
        mean_accepted_length: tokens per target forward (τ), the target's own included; of the very guesses that
            the tree was chosen by, which are many times more than it has nodes.
    """

    accuracies: tuple[tuple[float, ...], ...]
    num_nodes: int
    mean_accepted_length: float


class RankCounts:
    """Counts which guess of each head was right.

    Args:
        num_heads: of the draft.
        num_ranks: guesses of each head that are looked at.
    """

    def __init__(self, num_heads: int, num_ranks: int) -> None:
        self._num_heads = num_heads
        self._num_ranks = num_ranks
        self._paths: Counter[tuple[int, ...]] = Counter()

    def add(self, paths: Sequence[Sequence[int]]) -> None:
        """Takes for each position the rank of the right guess of each head, ``num_ranks`` where there is none."""
        self._paths.update(tuple(path) for path in paths)

    def acceptance(self, num_nodes: int) -> TreeAcceptance | None:
        """None when nothing was counted."""
        total = self._paths.total()
        if not total:
            return None
        accuracies = tuple(
            tuple(self._num_with(head, rank) / total for rank in range(self._num_ranks))
            for head in range(self._num_heads)
        )
        nodes = _best_paths(accuracies, num_nodes)
        num_accepted = sum(
            count * sum(path[:length] in nodes for length in range(1, len(path) + 1))
            for path, count in self._paths.items()
        )
        return TreeAcceptance(accuracies, len(nodes), 1.0 + num_accepted / total)

    def _num_with(self, head: int, rank: int) -> int:
        return sum(count for path, count in self._paths.items() if path[head] == rank)


def _best_paths(accuracies: Sequence[Sequence[float]], num_nodes: int) -> frozenset[tuple[int, ...]]:
    """Ranks along the paths of the tree with the most accepted tokens to expect (arXiv 2401.10774, section 2.3.3)."""
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    found: list[tuple[int, ...]] = []
    while waiting and len(found) <= num_nodes:  # the root is none of the nodes
        chance, path = heapq.heappop(waiting)
        found.append(path)
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if accuracy > 0:
                    heapq.heappush(waiting, (chance * accuracy, (*path, rank)))
    return frozenset(found[1:])
