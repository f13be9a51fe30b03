"""The evaluation uses the best tree and counts its accepted paths."""

from __future__ import annotations

import itertools

import pytest

from baton.train.tree_evaluation import RankCounts

MISS = 2


def counted(paths: list[tuple[int, ...]], num_heads: int = 2) -> RankCounts:
    counts = RankCounts(num_heads, MISS)
    counts.add(paths)
    return counts


def test_rates_are_counted_by_head_and_rank() -> None:
    found = counted([(0, 0), (0, 1), (1, MISS), (MISS, 0)]).acceptance(1)
    assert found is not None
    assert found.accuracies == ((0.5, 0.25), (0.5, 0.25))
    assert found.num_nodes == 1
    assert found.mean_accepted_length == 1.5  # the likeliest first token alone


def test_a_path_ends_at_the_first_wrong_guess() -> None:
    found = counted([(MISS, 0), (0, MISS), (0, 0)]).acceptance(2)
    assert found is not None
    assert found.mean_accepted_length == pytest.approx(1 + (0 + 1 + 2) / 3)


def test_an_empty_count_has_no_acceptance() -> None:
    assert counted([]).acceptance(4) is None


def test_the_chosen_tree_has_the_highest_expected_acceptance() -> None:
    counts = counted([(0, 0)] * 5 + [(0, 1)] * 3 + [(1, 0)] * 4 + [(1, 1)] * 2 + [(MISS, 0)] * 2)
    found = counts.acceptance(3)
    assert found is not None
    nodes = [(0,), (1,), *itertools.product(range(2), range(2))]

    def chance(path: tuple[int, ...]) -> float:
        product = 1.0
        for head, rank in enumerate(path):
            product *= found.accuracies[head][rank]
        return product

    trees = [
        tree for tree in itertools.combinations(nodes, 3) if all(path[:1] in tree for path in tree if len(path) > 1)
    ]
    best = max(trees, key=lambda tree: sum(map(chance, tree)))
    assert set(best) == {(0,), (1,), (0, 0)}
    # Counted: (0, 0) gives 2, (0, 1) and (1, anything) give 1.
    assert found.mean_accepted_length == pytest.approx(1 + (5 * 2 + 3 + 4 + 2) / 16)
