"""Draft trees: confidences, and the verdict of the generated tokens on a draft."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.drafts import ROOT, Draft
from decode_worker.speculation.lookahead import merge_paths
from decode_worker.speculation.tree import branch_probabilities, confidences_of, is_prefix, reach_probabilities, tried

_PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Trees with confidences."""
    draft, _ = merge_paths(draw(_PATHS))
    chances = draw(st.lists(st.floats(0, 1), min_size=len(draft), max_size=len(draft)))
    return Draft(draft.token_ids, draft.parents, tuple(chances))


@given(drafts())
def test_confidences_and_branch_probabilities_are_inverse(draft: Draft) -> None:
    parents = [draft.parent(node) for node in range(len(draft))]
    branches = branch_probabilities(draft)
    for parent in {ROOT, *parents}:
        assert sum(branch for above, branch in zip(parents, branches, strict=True) if above == parent) <= 1 + 1e-9
    again = branch_probabilities(Draft(draft.token_ids, draft.parents, confidences_of(parents, branches)))
    assert again == pytest.approx(branches, abs=1e-9)
    assert 0 <= sum(reach_probabilities(draft)) <= max((len(draft.path(node)) for node in range(len(draft))), default=0)


def test_accepted_tokens_inform_only_about_children_of_visited_nodes() -> None:
    draft = Draft((1, 2, 3, 4, 5), (ROOT, ROOT, 1, 1, 2))  # 1 and 2 below the root, 3 and 4 below 2, 5 below 3
    assert tried(draft, (2, 3, 9)) == [[(0, False), (1, True)], [(2, True), (3, False)], [(4, False)]]
    assert tried(draft, (2, 3)) == [[(0, False), (1, True)], [(2, True), (3, False)]], "nothing is known of 5"
    assert tried(draft, (1, 3)) == [[(0, True), (1, False)]], "nothing is below 1"
    assert tried(draft, (7, 3)) == [[(0, False), (1, False)]]
    assert tried(Draft((1, 2)), (1,)) == [[(0, True)]]


def test_a_prefix_consists_of_first_nodes_and_is_never_empty() -> None:
    tree = Draft((1, 2, 3), (ROOT, ROOT, 0))
    assert all(is_prefix(tree.first(count), tree) for count in (1, 2, 3))
    assert not is_prefix(Draft(), tree)
    assert not is_prefix(Draft((1, 2)), tree), "a chain of the same tokens is another draft"
    assert not is_prefix(Draft((1, 3), (ROOT, ROOT)), tree)
    assert not is_prefix(tree, tree.first(2))
