"""Draft trees: static ones, such that grow level by level, and merged token paths. No torch here.

A *branch probability* is the chance that the target chooses a node's token, given that it chose the node's ancestors.
Those of siblings add up to at most 1. ``Draft.confidences`` are conditional on the earlier siblings too; see
:func:`confidences_of`.

Which nodes stay is decided here by looking at tokens. That is right for guesses, whose verification does not care where
they come from, and wrong for drafts that were drawn: those may only lose nodes from their end (``Draft.first``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.drafts import ROOT, Draft
from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A tree whose shape is fixed; every node is one of the likeliest tokens at its depth.

    Attributes:
        parents: of each node the index of its parent, or ROOT.
        ranks: of each node how many tokens at its depth are likelier than its own.
        depths: of each node; those right below the root have depth 0.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_ranks(self) -> list[int]:
        """How many of the likeliest tokens are needed at each depth."""
        needed = [0] * (max(self.depths) + 1)
        for depth, rank in zip(self.depths, self.ranks, strict=True):
            needed[depth] = max(needed[depth], rank + 1)
        return needed

    def draft(self, token_ids: Sequence[Sequence[int]], probs: Sequence[Sequence[float]] | None = None) -> Draft:
        """Puts tokens in the places.

        Args:
            token_ids: for each depth its tokens, likeliest first and different; at least :attr:`num_ranks` of them. A
                tree deeper than there are depths is cut.
            probs: branch probabilities of these tokens, if they are known.
        """
        kept = [node for node in range(len(self)) if self.depths[node] < len(token_ids)]
        places = [(self.depths[node], self.ranks[node]) for node in kept]
        return _draft(
            [token_ids[depth][rank] for depth, rank in places],
            reindexed(self.parents, kept),
            None if probs is None else [probs[depth][rank] for depth, rank in places],
        )


def static_tree(choices: Sequence[Sequence[int]]) -> StaticTree:
    """Reads a tree as Medusa and EAGLE write them: each node is the path of ranks that leads to it.

    ``[(0,), (1,), (0, 0)]`` is the two likeliest next tokens and the likeliest one behind the first. Nodes keep the
    order of the list, so that it should have the best nodes first; a parent that comes late is moved before its child.

    Raises:
        ConfigError: a path is empty, has a negative rank, comes twice, or its parent is not there.
    """
    paths = [tuple(choice) for choice in choices]
    known = set(paths)
    if not paths:
        raise ConfigError("A draft tree needs at least one node, got an empty list of choices.")
    if len(known) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ConfigError(f"The draft tree has the choice {list(twice)} twice; every node may be listed once.")
    for path in paths:
        if not path or min(path) < 0:
            raise ConfigError(f"A choice of a draft tree is a path of ranks from 0 upwards, got {list(path)}.")
        if path[:-1] and path[:-1] not in known:
            raise ConfigError(f"The draft tree has the choice {list(path)}, but not its parent {list(path[:-1])}.")
    places: dict[tuple[int, ...], int] = {}
    for path in paths:
        for length in range(1, len(path) + 1):
            places.setdefault(path[:length], len(places))
    return StaticTree(
        parents=tuple(places.get(path[:-1], ROOT) for path in places),
        ranks=tuple(path[-1] for path in places),
        depths=tuple(len(path) - 1 for path in places),
    )


def best_choices(accuracies: Sequence[Sequence[float]], num_nodes: int) -> list[tuple[int, ...]]:
    """The choices whose tree has the most accepted tokens to expect, best first (arXiv 2401.10774, section 2.3.3).

    Args:
        accuracies: for each depth, how often its likeliest token, its second likeliest and so on are right.
        num_nodes: of the tree; fewer come back when there are no more.

    Raises:
        ConfigError: an accuracy is not in [0, 1], or those of one depth add up to more than 1.
    """
    for depth, row in enumerate(accuracies):
        if any(not 0 <= accuracy <= 1 for accuracy in row) or sum(row) > 1 + 1e-6:
            raise ConfigError(
                f"The accuracies at depth {depth} of a draft tree must be in [0, 1] and add up to at most 1, "
                f"got {list(row)}."
            )
    if not accuracies:
        return []
    waiting: list[tuple[float, tuple[int, ...]]] = [
        (-accuracy, (rank,)) for rank, accuracy in enumerate(accuracies[0]) if accuracy > 0
    ]
    heapq.heapify(waiting)
    found: list[tuple[int, ...]] = []
    while waiting and len(found) < num_nodes:
        chance, path = heapq.heappop(waiting)
        found.append(path)
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if accuracy > 0:
                    heapq.heappush(waiting, (chance * accuracy, (*path, rank)))
    return found


@dataclass(slots=True)
class GrowingTree:
    """EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): the best nodes of each level are expanded, and in the end
    the best nodes of all levels are kept.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of each node's branch; its score is their sum along its path."""
    scores: list[float] = field(default_factory=list)

    def expand(
        self,
        parents: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        width: int,
    ) -> list[int]:
        """Adds a level, and returns those of its nodes that should be expanded next.

        Args:
            parents: nodes of the level before, ``[ROOT]`` for the first.
            token_ids: for each parent the tokens that may follow it, all different, likeliest first.
            log_probs: of these tokens after their parents.
            width: how many nodes to expand next.
        """
        start = len(self.token_ids)
        for parent, tokens, chances in zip(parents, token_ids, log_probs, strict=True):
            above = 0.0 if parent == ROOT else self.scores[parent]
            for token, log_prob in zip(tokens, chances, strict=True):
                self.token_ids.append(token)
                self.parents.append(parent)
                self.log_probs.append(log_prob)
                self.scores.append(above + min(log_prob, 0.0))
        level = range(start, len(self.token_ids))
        return sorted(level, key=lambda node: -self.scores[node])[:width]

    def path(self, node: int) -> list[int]:
        """Token ids from below the root down to ``node``."""
        found: list[int] = []
        while node != ROOT:
            found.append(self.token_ids[node])
            node = self.parents[node]
        return found[::-1]

    def draft(self, num_nodes: int) -> Draft:
        """The best ``num_nodes`` nodes, in the order in which they were added."""
        kept = best_nodes(self.parents, self.scores, num_nodes)
        return _draft(
            [self.token_ids[node] for node in kept],
            reindexed(self.parents, kept),
            [math.exp(min(self.log_probs[node], 0.0)) for node in kept],
        )


def merge_paths(
    paths: Sequence[Sequence[int]], probs: Sequence[Sequence[float]] | None = None
) -> tuple[Draft, list[list[int]]]:
    """One tree of several guesses at what follows; what they begin with in common is there once.

    Args:
        paths: token ids, nearest first.
        probs: branch probabilities, one for each token; where paths share a node, the highest holds.

    Returns:
        The draft, whose nodes are those of the first path, then what each further one adds; and for each path the
        nodes of its tokens.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    best: list[float] = []
    nodes: dict[tuple[int, int], int] = {}
    places: list[list[int]] = []
    for index, path in enumerate(paths):
        parent = ROOT
        place: list[int] = []
        for depth, token in enumerate(path):
            node = nodes.setdefault((parent, token), len(token_ids))
            if node == len(token_ids):
                token_ids.append(token)
                parents.append(parent)
                best.append(0.0)
            if probs is not None:
                best[node] = max(best[node], probs[index][depth])
            place.append(node)
            parent = node
        places.append(place)
    return _draft(token_ids, parents, None if probs is None else best), places


def best_nodes(parents: Sequence[int], scores: Sequence[float], num_nodes: int) -> list[int]:
    """Indices of the nodes with the highest scores, ascending. No node counts for more than its parent, so that they
    are a tree.

    Args:
        parents: parents before children.
        scores: one per node, e.g. sums of log probabilities along its path.
    """
    limits: list[float] = []
    for parent, score in zip(parents, scores, strict=True):
        limits.append(score if parent == ROOT else min(score, limits[parent]))
    order = sorted(range(len(limits)), key=lambda node: -limits[node])
    return sorted(order[: max(0, num_nodes)])


def reindexed(parents: Sequence[int], kept: Sequence[int]) -> tuple[int, ...]:
    """Parents of the kept nodes, as indices among them. ``kept`` is ascending and has every node's ancestors."""
    places = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
    return tuple(places[parents[node]] for node in kept)


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


def _draft(token_ids: Sequence[int], parents: Sequence[int], branches: Sequence[float] | None) -> Draft:
    """A draft; one without branches is a chain, which needs neither masks nor moves."""
    is_chain = list(parents) == list(range(-1, len(parents) - 1))
    return Draft(
        token_ids=tuple(token_ids),
        parents=() if is_chain else tuple(parents),
        confidences=() if branches is None else confidences_of(parents, branches),
    )


def children_of(draft: Draft) -> dict[int, list[int]]:
    """The children of each node that has any, and of the root, in their order."""
    children: dict[int, list[int]] = {}
    for node in range(len(draft)):
        children.setdefault(draft.parent(node), []).append(node)
    return children


def tried(draft: Draft, outcome: Sequence[int]) -> list[list[tuple[int, bool]]]:
    """What the tokens that came say about a draft, whether it was verified or not.

    Returns:
        By depth, as far as the tokens are those of nodes: the children of the last such node, and whether each of them
        is what came. Only the last depth can be without the right one.
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
