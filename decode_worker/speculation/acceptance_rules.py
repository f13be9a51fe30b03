"""Rules that decide on a draft by the target's probabilities: which path is accepted, and what follows it.

Both are called with every row's *processed* distribution, so that penalties, filters and forbidden tokens hold for
each node along its own path. A row that the model did not compute properly is all 0: nothing is accepted on it.

Every purpose of random numbers has its own stream at each position. The coins and the recovering draw of a position
determine its token, in every round. The numbers of drafting may be reused in a later round, because no accepted token
depends on them.

stream    0 (``PLAIN``)         1 (``RECOVER``)              2 + 2·j                3 + 2·j
purpose   plain, bonus token    token after a rejection      coin of sibling j      draw of sibling j by the draft
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch

from baton.core.drafts import ROOT, Draft, depths_of
from baton.engine.device.uploads import take_rows, upload
from baton.engine.sampling.logits import SamplingRow
from baton.engine.sampling.sampler import draw, uniform
from decode_worker.speculation.tree import children_of

PLAIN = 0
RECOVER = 1


def coin_stream(sibling: int) -> int:
    """The stream that decides whether a node is accepted; ``sibling`` counts the node's earlier siblings."""
    return 2 + 2 * sibling


def draft_stream(sibling: int) -> int:
    """The stream that draws a node; ``sibling`` counts the node's earlier siblings."""
    return 3 + 2 * sibling


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a draft.

    Attributes:
        nodes: the accepted path through the draft.
        next_token: the token after the path; ``None`` when the target's row there is not a distribution.
    """

    nodes: tuple[int, ...]
    next_token: int | None


class AcceptanceRule(Protocol):
    """Decides on one sequence's draft."""

    is_lossless: ClassVar[bool]
    """Whether the output has the target's own distribution."""

    def applies_to(self, draft: Draft) -> bool:
        """Whether the rule can judge a draft for a sampled request."""
        ...

    def judge(self, draft: Draft, target: torch.Tensor, rows: Sequence[SamplingRow]) -> Verdict:
        """Decides on a draft.

        Args:
            target: float64 ``[len(draft) + 1, vocab_size]``; row 0 is the root's, row ``i + 1`` follows node ``i``.
            rows: the sampling state of each row.
        """
        ...


class ResidualRule:
    """Verifies drafts that were drawn from the distributions ``Draft.probs``.

    A node with token x, drawn from q, is accepted with probability min(1, p(x) / q(x)); after a rejection p becomes
    norm(max(p - q, 0)) and its next sibling, drawn without replacement, is tried with q without x. What is left
    of p in the end gives the recovered token. On a chain this is the rule of Leviathan et al. (arXiv 2211.17192,
    section 2.3), on a tree that of SpecInfer (arXiv 2305.09781, algorithm 2).

    The tokens have the target's distribution on two conditions. Which nodes a draft has must not depend on their own
    tokens: its proposer may stop wherever it likes before it draws, but may not leave out what it has drawn. And
    ``Draft.probs`` must be the distributions that it drew from. A seed does not give the tokens of plain decoding.
    """

    is_lossless: ClassVar[bool] = True

    def applies_to(self, draft: Draft) -> bool:
        return draft.probs is not None

    def judge(self, draft: Draft, target: torch.Tensor, rows: Sequence[SamplingRow]) -> Verdict:
        """See :class:`AcceptanceRule`. Raises ValueError for a draft without ``probs``."""
        if draft.probs is None:
            raise ValueError(
                "this rule needs the probabilities from which the draft was sampled, but the draft has none"
            )
        children = children_of(draft)
        path: list[int] = []
        node = ROOT
        while siblings := children.get(node):
            row = rows[node + 1]
            p = target[node + 1]
            q = _normalised(draft.probs[siblings[0]].to(p))
            for tried, child in enumerate(siblings):
                token = draft.token_ids[child]
                if self.accepts(float(p[token]), float(q[token]), row, tried):
                    break
                p, q = self.reject(p, q, token)
            else:
                return Verdict(tuple(path), self.recover(p, row))
            path.append(child)
            node = child
        return Verdict(tuple(path), draw_token(target[node + 1], rows[node + 1], PLAIN))

    def accepts(self, p: float, q: float, row: SamplingRow, tried: int) -> bool:
        """Never accepts a token of probability 0, even if the coin is 0."""
        return q > 0 and uniform(row.params.seed, row.position, coin_stream(tried)) < p / q

    def reject(self, p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``p`` and ``q`` for the siblings that follow a rejected one; both ``[vocab_size]``."""
        rest = q.clone()
        rest[token : token + 1] = 0  # a fill; a single element would be copied to a device, from pageable memory
        return _normalised((p - q).clamp_min(0), otherwise=p), _normalised(rest)

    def recover(self, left: torch.Tensor, row: SamplingRow) -> int | None:
        """The token that replaces the rejected ones."""
        return draw_token(left, row, RECOVER)


@dataclass(frozen=True, slots=True)
class TypicalRule:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1): accepts plausible tokens. **Lossy**: the output
    does not have the target's distribution.

    A node is accepted when its parent is and p(token) > min(epsilon, alpha · exp(-entropy of p)). The deepest accepted
    node wins, the earliest of equals, and the target's own draw follows it.

    Attributes:
        epsilon: a token of at least this probability is always accepted.
        alpha: scales the threshold where the target is undecided.
    """

    epsilon: float = 0.09
    alpha: float = 0.3
    is_lossless: ClassVar[bool] = False

    def applies_to(self, draft: Draft) -> bool:
        return len(draft) > 0

    def judge(self, draft: Draft, target: torch.Tensor, rows: Sequence[SamplingRow]) -> Verdict:
        """See :class:`AcceptanceRule`."""
        entropy = torch.special.entr(target).sum(dim=-1)
        thresholds = (self.alpha * torch.exp(-entropy)).clamp_max(self.epsilon)
        parents = [draft.parent(node) for node in range(len(draft))]
        above = [parent + 1 for parent in parents]
        places, tokens = upload(np.array([above, draft.token_ids], dtype=np.int64), target.device).unbind()
        plausible = (target[places, tokens] > thresholds[places]).tolist()
        reached = [ROOT]
        for node, parent in enumerate(parents):
            if plausible[node] and parent in reached:
                reached.append(node)
        levels = [-1, *depths_of(parents)]
        best = max(reached, key=lambda node: levels[node + 1])
        path = () if best == ROOT else draft.path(best)
        return Verdict(path, draw_token(target[best + 1], rows[best + 1], PLAIN))


def draw_from(probs: torch.Tensor, rows: Sequence[SamplingRow], stream: int) -> list[int]:
    """One token per row.

    Args:
        probs: ``[num_rows, vocab_size]``, none of them all 0; need not sum to 1.
        rows: their seeds and positions key the noise.
        stream: one of this module's streams.
    """
    noise = [uniform(row.params.seed, row.position, stream) for row in rows]
    tokens: list[int] = draw(probs.double(), noise).tolist()
    return tokens


def draw_drafts(probs: torch.Tensor, rows: Sequence[SamplingRow], num_siblings: int = 1) -> list[list[int]]:
    """Draws the guesses of a draft, so that :class:`ResidualRule` can verify them.

    Args:
        probs: ``[num_rows, vocab_size]``: the draft's logits after ``process_logits`` with ``rows`` and
            a softmax. The same numbers go into ``Draft.probs``, once for each sibling.
        rows: ``baton.engine.sampling.verification.sampling_row`` of the drafted path so far.
        num_siblings: different tokens to draw for each row.

    Returns:
        For each row its tokens in the order in which they were drawn, which is that of their nodes; fewer than
        ``num_siblings`` where there are no more tokens of any probability.
    """
    left = probs.double()
    drawn: list[list[int]] = [[] for _ in rows]
    for sibling in range(num_siblings):
        able = [index for index, has_any in enumerate((left.sum(dim=-1) > 0).tolist()) if has_any]
        if not able:
            break
        tokens = draw_from(take_rows(left, able), [rows[index] for index in able], draft_stream(sibling))
        for index, token in zip(able, tokens, strict=True):
            drawn[index].append(token)
        if sibling + 1 < num_siblings:
            places = upload(np.array([able, tokens], dtype=np.int64), left.device).unbind()
            left = left.index_put(places, left.new_zeros(()))
    return drawn


def draw_token(probs: torch.Tensor, row: SamplingRow, stream: int) -> int | None:
    """A token from ``[vocab_size]``, or None when no token has any probability."""
    if not float(probs.sum()) > 0:
        return None
    return draw_from(probs[None], [row], stream)[0]


def _normalised(weights: torch.Tensor, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """``weights`` with sum 1. When they have no sum, by rounding: ``otherwise``, or themselves."""
    total = float(weights.sum())
    if total > 0:
        return weights / total
    return weights if otherwise is None else otherwise
