"""Drafts: tokens guessed to follow a sequence's last known token, as a chain or as a tree. No torch at run time.

root      the last known token, whose logits verify the nodes without a parent
nodes     in the order of their slots, parents before children

    root ─ 0 ─ 1 ─ 4          token_ids  (a, b, c, d, e)
         └ 2 ─ 3              parents    (-1, 0, -1, 2, 1)         depths (0, 1, 0, 1, 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.request import Request

if TYPE_CHECKING:
    import torch

ROOT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain or tree of guessed tokens.

    Attributes:
        token_ids: one per node.
        parents: index of each node's parent, or :data:`ROOT`; empty for a chain, nearest token first. Siblings have
            different tokens.
        confidences: for each node the estimated probability that the target agrees, given that it agreed with the
            node's ancestors and with none of its earlier siblings. The likeliest nodes should come first, since the
            last ones are dropped when not all can be verified.
        probs: ``[len(token_ids), vocab_size]``, the processed distribution that each node was drawn from, together
            with its siblings and without replacement; ``None`` for guesses that were not drawn.
        method: name of the speculation method, for statistics; empty if not set.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    probs: torch.Tensor | None = None
    method: str = field(default="", compare=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return not self.parents

    def parent(self, node: int) -> int:
        """The index of a node's parent, or :data:`ROOT`."""
        return self.parents[node] if self.parents else node - 1

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the first below the root down to ``node`` itself."""
        if self.is_chain:
            return tuple(range(node + 1))
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return tuple(reversed(found))

    def first(self, count: int) -> Draft:
        """The first ``count`` nodes. The result is a tree again, since parents come before children."""
        if count >= len(self):
            return self
        return Draft(
            self.token_ids[:count],
            self.parents[:count],
            self.confidences[:count],
            None if self.probs is None else self.probs[:count],
            self.method,
        )

    def guessed_by(self, method: str) -> Draft:
        """Returns the same draft with the name of its method."""
        return Draft(self.token_ids, self.parents, self.confidences, self.probs, method)


NO_DRAFT = Draft()


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each node; children of the root have depth 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence of a step: compute ``[num_computed_tokens, … + num_tokens)``, then verify ``draft`` behind them."""

    request: Request
    num_tokens: int
    draft: Draft = NO_DRAFT

    @property
    def num_new_tokens(self) -> int:
        """Rows of the forward, drafts included."""
        return self.num_tokens + len(self.draft)

    @property
    def samples(self) -> bool:
        """True when the step reaches the last known token, so that it yields a new one."""
        return self.request.num_computed_tokens + self.num_tokens == self.request.num_tokens
