"""The length of accepted paths when independent guesses are verified as a tree."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeAcceptance:
    """The acceptance of the best tree.

    Attributes:
        accuracies: by head and rank, how often this guess equalled the answer's token.
        num_nodes: number of nodes of the best tree for these accuracies.
        mean_accepted_length: tokens per forward pass of the target (τ), including the target's own token. Measured on
            the same guesses by which the tree was chosen, which outnumber its nodes many times.
    """

    accuracies: tuple[tuple[float, ...], ...]
    num_nodes: int
    mean_accepted_length: float


class RankCounts:
    """Counts which guess of each head was right.

    Args:
        num_heads: number of the draft's heads.
        num_ranks: number of each head's guesses that are counted.
    """

    def __init__(self, num_heads: int, num_ranks: int) -> None:
        self._num_heads = num_heads
        self._num_ranks = num_ranks
        self._paths: Counter[tuple[int, ...]] = Counter()

    def add(self, paths: Sequence[Sequence[int]]) -> None:
        """Adds, for each position, the rank of each head's right guess, or ``num_ranks`` if none was right."""
        self._paths.update(tuple(path) for path in paths)

    def acceptance(self, num_nodes: int) -> TreeAcceptance | None:
        """The acceptance of the best tree with ``num_nodes`` nodes; ``None`` when nothing was counted."""
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
    """The paths of ranks of the tree with the most expected accepted tokens (arXiv 2401.10774, section 2.3.3)."""
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    found: list[tuple[int, ...]] = []
    while waiting and len(found) <= num_nodes:  # the root does not count as a node
        chance, path = heapq.heappop(waiting)
        found.append(path)
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if accuracy > 0:
                    heapq.heappush(waiting, (chance * accuracy, (*path, rank)))
    return frozenset(found[1:])
