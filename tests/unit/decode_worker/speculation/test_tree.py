"""Draft trees are trees: parents before children, siblings different, the best nodes kept."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.drafts import ROOT, Draft
from baton.core.errors import ConfigError
from decode_worker.speculation.tree import (
    GrowingTree,
    best_choices,
    best_nodes,
    branch_probabilities,
    confidences_of,
    is_prefix,
    merge_paths,
    reach_probabilities,
    reindexed,
    static_tree,
    tried,
)

_PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Trees with confidences."""
    draft, _ = merge_paths(draw(_PATHS))
    chances = draw(st.lists(st.floats(0, 1), min_size=len(draft), max_size=len(draft)))
    return Draft(draft.token_ids, draft.parents, tuple(chances))


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.token_ids[index] for index in draft.path(node)) for node in range(len(draft))]


def assert_is_tree(draft: Draft) -> None:
    assert len(draft.parents) in (0, len(draft))
    assert all(ROOT <= draft.parent(node) < node for node in range(len(draft)))
    # Equal paths would be equal siblings somewhere.
    assert len(set(paths_of(draft))) == len(draft)
    assert all(0 <= confidence <= 1 for confidence in draft.confidences)


def test_choices_as_medusa_writes_them() -> None:
    tree = static_tree([[0], [0, 0], [1], [0, 1], [0, 0, 0], [1, 0]])
    assert tree.parents == (ROOT, 0, ROOT, 0, 1, 2)
    assert tree.ranks == (0, 0, 1, 1, 0, 0)
    assert tree.depths == (0, 1, 0, 1, 2, 1)
    assert tree.num_ranks == [2, 2, 1]
    draft = tree.draft([[10, 11], [20, 21, 22], [30]], [[0.6, 0.3], [0.5, 0.25, 0.1], [0.4]])
    assert draft.token_ids == (10, 20, 11, 21, 30, 20)
    assert draft.parents == tree.parents
    assert draft.confidences == pytest.approx((0.6, 0.5, 0.75, 0.5, 0.4, 0.5))
    assert_is_tree(draft)


def test_a_tree_is_cut_where_there_are_no_more_tokens_and_a_single_branch_is_a_chain() -> None:
    tree = static_tree([[0], [0, 0], [1], [0, 0, 0]])
    assert tree.draft([[10, 11], [20]]) == Draft((10, 20, 11), (ROOT, 0, ROOT))
    assert static_tree([[0], [0, 0]]).draft([[10], [20]]) == Draft((10, 20))
    assert tree.draft([]) == Draft()


def test_a_parent_that_comes_late_is_moved_before_its_child() -> None:
    assert static_tree([[0, 1], [1], [0], [0, 0]]) == static_tree([[0], [0, 1], [1], [0, 0]])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "at least one node"),
        ([[0], []], "path of ranks"),
        ([[0], [-1]], "path of ranks"),
        ([[0], [0, 1], [0, 1]], r"\[0, 1\] twice"),
        ([[0], [1, 0]], r"not its parent \[1\]"),
    ],
)
def test_choices_that_are_no_tree_are_refused(choices: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        static_tree(choices)


def test_the_best_choices_are_the_most_probable_paths() -> None:
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.4, 0.1]]
    everything = {
        path: math.prod(accuracies[depth][rank] for depth, rank in enumerate(path))
        for length in (1, 2, 3)
        for path in itertools.product(*(range(len(row)) for row in accuracies[:length]))
    }
    for num_nodes in range(len(everything) + 3):
        choices = best_choices(accuracies, num_nodes)
        best = sorted(everything.values(), reverse=True)[:num_nodes]
        assert [everything[path] for path in choices] == pytest.approx(best)
        if choices:
            assert len(static_tree(choices)) == len(choices)
    assert best_choices([], 5) == []
    assert best_choices([[1.0, 0.0], [1.0]], 5) == [(0,), (0, 0)]


@pytest.mark.parametrize("accuracies", [[[0.5], [1.2]], [[-0.1]], [[0.7, 0.7]]])
def test_accuracies_that_cannot_be_are_refused(accuracies: list[list[float]]) -> None:
    with pytest.raises(ConfigError, match="at depth"):
        best_choices(accuracies, 3)


def test_growing_like_eagle_2() -> None:
    tree = GrowingTree()
    frontier = tree.expand([ROOT], [[1, 2, 3]], [[math.log(p) for p in (0.5, 0.3, 0.1)]], width=2)
    assert frontier == [0, 1]
    chances = [[math.log(p) for p in (0.4, 0.2)], [math.log(p) for p in (0.9, 0.05)]]
    frontier = tree.expand(frontier, [[4, 5], [6, 7]], chances, width=2)
    assert [tree.path(node) for node in frontier] == [[2, 6], [1, 4]]
    tree.expand(frontier, [[8], [9]], [[math.log(0.5)], [math.log(0.1)]], width=2)
    # The scores are 0.5, 0.3, 0.1, then 0.2, 0.1, 0.27, 0.015, then 0.135 behind 2, 6.
    draft = tree.draft(5)
    assert draft == Draft(draft.token_ids, draft.parents, draft.confidences)
    assert paths_of(draft) == [(1,), (2,), (1, 4), (2, 6), (2, 6, 8)]
    assert draft.confidences == pytest.approx((0.5, 0.6, 0.4, 0.9, 0.5))
    assert paths_of(tree.draft(1)) == [(1,)]
    assert tree.draft(0) == Draft()


@given(st.data())
def test_any_growth_gives_a_tree_of_its_best_nodes(data: st.DataObject) -> None:
    tree = GrowingTree()
    frontier = [ROOT]
    for _ in range(data.draw(st.integers(1, 4))):
        tokens = [data.draw(st.lists(st.integers(0, 5), unique=True, max_size=3)) for _ in frontier]
        chances = [[data.draw(st.floats(-5, 0)) for _ in row] for row in tokens]
        frontier = tree.expand(frontier, tokens, chances, width=data.draw(st.integers(1, 3)))
        if not frontier:
            break
    num_nodes = data.draw(st.integers(0, 12))
    draft = tree.draft(num_nodes)
    assert_is_tree(draft)
    assert len(draft) == min(num_nodes, len(tree.token_ids))
    kept = best_nodes(tree.parents, tree.scores, num_nodes)
    left_out = set(range(len(tree.scores))) - set(kept)
    assert all(tree.scores[out] <= tree.scores[node] for out in left_out for node in kept)
    assert [tuple(tree.path(node)) for node in kept] == paths_of(draft)


@given(_PATHS)
def test_merged_paths_are_all_there_and_nothing_else(paths: list[list[int]]) -> None:
    draft, places = merge_paths(paths)
    assert_is_tree(draft)
    for path, nodes in zip(paths, places, strict=True):
        assert [draft.token_ids[node] for node in nodes] == path
        assert list(draft.path(nodes[-1])) == nodes
    assert {node for nodes in places for node in nodes} == set(range(len(draft)))
    assert paths_of(draft)[: len(paths[0])] == [tuple(paths[0][: end + 1]) for end in range(len(paths[0]))]
    assert merge_paths([path for path in paths for _ in range(2)])[0] == draft


def test_merged_paths_keep_the_highest_probability() -> None:
    draft, places = merge_paths([[1, 2], [1, 3], [4]], [[0.2, 0.5], [0.6, 0.25], [0.3]])
    assert draft == Draft((1, 2, 3, 4), (ROOT, 0, 0, ROOT), draft.confidences)
    assert places == [[0, 1], [0, 2], [3]]
    assert draft.confidences == pytest.approx((0.6, 0.5, 0.5, 0.75))
    assert merge_paths([]) == (Draft(), [])
    assert merge_paths([[5, 6], [5]], [[0.5, 0.4], [0.1]])[0] == Draft((5, 6), (), (0.5, 0.4))


@given(drafts())
def test_confidences_and_branch_probabilities_are_each_others_reverse(draft: Draft) -> None:
    parents = [draft.parent(node) for node in range(len(draft))]
    branches = branch_probabilities(draft)
    for parent in {ROOT, *parents}:
        assert sum(branch for above, branch in zip(parents, branches, strict=True) if above == parent) <= 1 + 1e-9
    again = branch_probabilities(Draft(draft.token_ids, draft.parents, confidences_of(parents, branches)))
    assert again == pytest.approx(branches, abs=1e-9)
    assert 0 <= sum(reach_probabilities(draft)) <= max((len(draft.path(node)) for node in range(len(draft))), default=0)


def test_indices_among_kept_nodes() -> None:
    assert reindexed([ROOT, ROOT, 1, 0, 2], [1, 2, 4]) == (ROOT, 0, 1)


def test_what_came_says_something_about_the_children_of_what_it_went_through() -> None:
    draft = Draft((1, 2, 3, 4, 5), (ROOT, ROOT, 1, 1, 2))  # 1 and 2 below the root, 3 and 4 below 2, 5 below 3
    assert tried(draft, (2, 3, 9)) == [[(0, False), (1, True)], [(2, True), (3, False)], [(4, False)]]
    assert tried(draft, (2, 3)) == [[(0, False), (1, True)], [(2, True), (3, False)]], "nothing is known of 5"
    assert tried(draft, (1, 3)) == [[(0, True), (1, False)]], "nothing is below 1"
    assert tried(draft, (7, 3)) == [[(0, False), (1, False)]]
    assert tried(Draft((1, 2)), (1,)) == [[(0, True)]]


def test_a_prefix_is_made_of_first_nodes_and_is_never_empty() -> None:
    tree = Draft((1, 2, 3), (ROOT, ROOT, 0))
    assert all(is_prefix(tree.first(count), tree) for count in (1, 2, 3))
    assert not is_prefix(Draft(), tree)
    assert not is_prefix(Draft((1, 2)), tree), "a chain of the same tokens is another draft"
    assert not is_prefix(Draft((1, 3), (ROOT, ROOT)), tree)
    assert not is_prefix(tree, tree.first(2))
