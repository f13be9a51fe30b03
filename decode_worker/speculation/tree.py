"""What several methods and the controller need to know about draft trees. No torch here.

The *branch probability* of a node is the chance that the target chooses the node's token, given that it chose the
node's ancestors. Those of siblings add up to at most 1. ``Draft.confidences`` are conditional on the earlier siblings
too; see :func:`confidences_of`.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.drafts import ROOT, Draft


def tree_draft(token_ids: Sequence[int], parents: Sequence[int], branches: Sequence[float] | None = None) -> Draft:
    """A draft of these nodes. One without branches becomes a chain, which needs neither masks nor moves.

    Args:
        parents: index of each node's parent, or ROOT; parents come before children.
        branches: branch probabilities.
    """
    is_chain = list(parents) == list(range(-1, len(parents) - 1))
    return Draft(
        token_ids=tuple(token_ids),
        parents=() if is_chain else tuple(parents),
        confidences=() if branches is None else confidences_of(parents, branches),
    )


def confidences_of(parents: Sequence[int], branches: Sequence[float]) -> tuple[float, ...]:
    """``Draft.confidences`` of a tree with these branch probabilities."""
    left: dict[int, float] = {}
    found: list[float] = []
    for parent, branch in zip(parents, branches, strict=True):
        rest = left.get(parent, 1.0)
        found.append(min(max(branch / rest, 0.0), 1.0) if rest > 0 else 0.0)
        left[parent] = rest - branch
    return tuple(found)


def branch_probabilities(draft: Draft) -> list[float]:
    """The reverse of :func:`confidences_of`."""
    left: dict[int, float] = {}
    found: list[float] = []
    for node, confidence in enumerate(draft.confidences):
        rest = left.get(draft.parent(node), 1.0)
        found.append(rest * confidence)
        left[draft.parent(node)] = rest * (1 - confidence)
    return found


def reach_probabilities(draft: Draft) -> list[float]:
    """For each node the chance that it is accepted. Their sum is the number of accepted tokens to expect."""
    found: list[float] = []
    for node, branch in enumerate(branch_probabilities(draft)):
        parent = draft.parent(node)
        found.append(branch if parent == ROOT else found[parent] * branch)
    return found


def children_of(draft: Draft) -> dict[int, list[int]]:
    """The children, in order, of the root and of each node that has any."""
    children: dict[int, list[int]] = {}
    for node in range(len(draft)):
        children.setdefault(draft.parent(node), []).append(node)
    return children


def tried(draft: Draft, outcome: Sequence[int]) -> list[list[tuple[int, bool]]]:
    """Compares a draft with the output, whether it was verified or not.

    Returns:
        By depth, along the path of right nodes: the children of the last right node, and whether each of them equals
        the output token. Only the last depth can lack a right one.
    """
    children = children_of(draft)
    found: list[list[tuple[int, bool]]] = []
    node = ROOT
    for token in outcome:
        siblings = children.get(node, [])
        if not siblings:
            break
        found.append([(child, draft.token_ids[child] == token) for child in siblings])
        right = [child for child, is_right in found[-1] if is_right]
        if not right:
            break
        node = right[0]
    return found


def is_prefix(draft: Draft, whole: Draft) -> bool:
    """Whether a draft is made of the first nodes of another, one at least."""
    count = len(draft)
    first = whole.first(count)
    return 0 < count <= len(whole) and draft.token_ids == first.token_ids and draft.parents == first.parents
