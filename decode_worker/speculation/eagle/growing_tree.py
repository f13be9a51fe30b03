"""One request's draft tree while it grows: its nodes, and which of them are rows of the head.

A node becomes a row of the head when it is expanded. The rows of a tree are in the order in which they were fed, after
the rows of the known tokens, in slots that the target will overwrite. Each row attends only to the known tokens and its
own ancestors, and its rotary position is that of its depth:

known tokens  t0 … tn-1       rows  (g0,t1) … (gn-2,tn-1)     at places 0 … n-2
1st guesses   a b c           rows  (hn-2,a) (hn-2,b)         at places n-1 n       position n-1, c is not expanded
after a, b    d e  f g        rows  (ha,d) (hb,f)             at places n+1 n+2     position n
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from baton.core.drafts import ROOT, Draft
from baton.core.request import SamplingParams
from baton.engine.batch.attention_groups import Span
from baton.engine.device.uploads import take_rows
from baton.engine.draft.eagle.feature_state import WaitingRows
from baton.engine.sampling.logits import SamplingRow
from baton.engine.sampling.verification import sampling_row
from decode_worker.speculation.acceptance import bucket_of, prior_of
from decode_worker.speculation.tree import tree_draft

_DEEPEST_KIND = 4


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of similar guesses, which share an acceptance estimate.

    Attributes:
        bucket: bucket of the head's probability of the token.
    """

    depth: int
    bucket: int
    is_greedy: bool

    @classmethod
    def of(cls, depth: int, probability: float, params: SamplingParams) -> Kind:
        return cls(min(depth, _DEEPEST_KIND), bucket_of(probability), params.is_greedy)

    @property
    def prior(self) -> float:
        return prior_of(self.bucket)


@dataclass(slots=True)
class GrowingTree:
    """One request's growing tree.

    Attributes:
        rows: rows of the known tokens.
        room: number of nodes to keep in the end.
        hidden: ``[len(output_of), hidden_size]``, the head's output for the nodes that were fed last.
        scores: for each node, the sum of the head's log probabilities along its path.
        kinds: for each node, its kind, which determines its chance.
        chances: for each node, the chance that the target agrees with it, given that it agrees with its parent.
        reach: for each node, the product of the chances along its path.
        beam: nodes to expand next; empty when the tree is finished.
        row_of: row of each expanded node.
        row_parents: for each row, the row of its parent.
        output_of: index in ``hidden`` of each node that was fed last.
        depth: number of levels.
    """

    rows: WaitingRows
    room: int
    hidden: torch.Tensor
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    beam: list[int] = field(default_factory=lambda: [ROOT])
    row_of: dict[int, int] = field(default_factory=lambda: {ROOT: ROOT})
    row_parents: list[int] = field(default_factory=list)
    output_of: dict[int, int] = field(default_factory=lambda: {ROOT: 0})
    depth: int = 0

    @property
    def num_free_slots(self) -> int:
        """The number of free rows, including the row of the last known token, which has no true row yet."""
        return self.room + 1 - len(self.row_parents)

    def path(self, node: int) -> list[int]:
        """Token ids from below the root down to ``node``."""
        found: list[int] = []
        while node != ROOT:
            found.append(self.token_ids[node])
            node = self.parents[node]
        return found[::-1]

    def sampling_rows(self) -> list[SamplingRow]:
        """The sampling state after each node of the beam."""
        return [sampling_row(self.rows.request, self.path(node)) for node in self.beam]

    def feed(self) -> Span:
        """Makes rows of the beam and returns their places."""
        start = self.rows.start + len(self.row_parents)
        for node in self.beam:
            self.row_of[node] = len(self.row_parents)
            self.row_parents.append(self.row_of[self.parents[node]])
        return Span(
            self.rows.request.block_ids,
            start,
            len(self.beam),
            parents=tuple(self.row_parents),
            first_key=self.rows.first_key,
        )

    def inputs(self) -> tuple[list[int], torch.Tensor]:
        """The tokens of the beam's rows, and the hidden states of their parents, ``[len(beam), hidden_size]``."""
        parents = [self.output_of[self.parents[node]] for node in self.beam]
        return [self.token_ids[node] for node in self.beam], take_rows(self.hidden, parents)

    def fed(self, hidden: torch.Tensor) -> None:
        """Takes the head's output ``[len(beam), hidden_size]`` for the beam."""
        self.hidden = hidden
        self.output_of = {node: index for index, node in enumerate(self.beam)}

    def expand(
        self,
        token_ids: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        chance_of: Callable[[Kind], float],
        width: int,
    ) -> None:
        """Adds a level below the beam, and chooses the next beam among its nodes.

        Args:
            token_ids: for each node of the beam, distinct tokens that may follow it, most likely first.
            log_probs: log probabilities of these tokens. Tokens with a non-finite value are left out.
            chance_of: returns the acceptance of a kind of guess.
            width: maximum number of nodes of the next beam.
        """
        start = len(self.token_ids)
        params = self.rows.request.params
        for parent, tokens, own in zip(self.beam, token_ids, log_probs, strict=True):
            score, reach = (0.0, 1.0) if parent == ROOT else (self.scores[parent], self.reach[parent])
            for token, log_prob in zip(tokens, own, strict=True):
                if not math.isfinite(log_prob):
                    continue
                kind = Kind.of(self.depth, math.exp(log_prob), params)
                chance = chance_of(kind)
                self.token_ids.append(token)
                self.parents.append(parent)
                self.scores.append(score + min(log_prob, 0.0))
                self.kinds.append(kind)
                self.chances.append(chance)
                self.reach.append(chance * reach)
        self.depth += 1
        level = sorted(range(start, len(self.token_ids)), key=lambda node: -self.scores[node])
        # Below this score even a certain child would not be among the best nodes.
        least = -math.inf if len(self.scores) < self.room else sorted(self.scores, reverse=True)[self.room - 1]
        self.beam = [node for node in level[:width] if self.scores[node] > least]

    def draft(self) -> tuple[Draft, list[Kind]]:
        """The best nodes, likeliest first, and the kind of each."""
        # A node never ranks before its parent in either order, so the kept nodes form a tree.
        kept = sorted(range(len(self.scores)), key=lambda node: -self.scores[node])[: self.room]
        nodes = sorted(kept, key=lambda node: (-self.reach[node], node))
        places = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
        draft = tree_draft(
            [self.token_ids[node] for node in nodes],
            [places[self.parents[node]] for node in nodes],
            [self.chances[node] for node in nodes],
        )
        return draft, [self.kinds[node] for node in nodes]
