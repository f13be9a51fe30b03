"""The acceptance of drafts on the target's answers: drafts as in serving, from every position at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from baton.engine.draft.eagle.head import EagleHead
from baton.train.batches import RowBatch
from baton.train.tree_evaluation import TreeAcceptance
from baton.train.unroll import unroll

# The share of likeliest tokens from which an answer counts as greedy: rounding costs a greedy answer a few, and an
# answer sampled at temperature 0.8 has far fewer.
_GREEDY_SHARE = 0.97
_ROWS_AT_ONCE = 512


@dataclass(slots=True)
class Acceptance:
    """Counts of the chains drafted from each position of some answers.

    Attributes:
        reached: by draft position, how often the answer was long enough.
        accepted: by draft position, how often this token and all before it equalled the answer's.
    """

    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def unconditional(self) -> list[float]:
        """By draft position, the share of chains that were accepted up to it."""
        return [share(good, all_) for good, all_ in zip(self.accepted, self.reached, strict=True)]

    @property
    def conditional(self) -> list[float]:
        """By draft position, the share of accepted tokens, given that the previous one was accepted."""
        rates = self.unconditional
        return [share(rate, before) for rate, before in zip(rates, [1.0, *rates], strict=False)]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per forward pass of the target (τ), including the target's own token."""
        return 1.0 + sum(self.unconditional)

    def add(self, other: Acceptance) -> None:
        """Adds the counts of ``other``."""
        size = len(other.reached)
        self.reached = [a + b for a, b in zip(self.reached or [0] * size, other.reached, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted or [0] * size, other.accepted, strict=True)]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer's token after each row of one sample, and the target's likeliest token there; int64 ``[num_rows]``."""

    next_token_ids: torch.Tensor
    choices: torch.Tensor

    @property
    def is_greedy(self) -> bool:
        """Whether the answer was probably sampled at temperature 0."""
        return float((self.choices == self.next_token_ids).float().mean()) >= _GREEDY_SHARE


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The acceptance of a draft.

    Attributes:
        greedy: on answers that the target gave at temperature 0.
        sampled: on the other answers, where the draft has to match random draws.
        greedy_tree, sampled_tree: the same with trees, for drafts that can form trees.
    """

    greedy: Acceptance
    sampled: Acceptance
    greedy_tree: TreeAcceptance | None = None
    sampled_tree: TreeAcceptance | None = None

    def of(self, answer: Answer) -> Acceptance:
        """The counts to which this answer's chains belong."""
        return self.greedy if answer.is_greedy else self.sampled


def share(part: float, whole: float) -> float:
    """``part / whole``; 0 when ``whole`` is 0."""
    return part / whole if whole else 0.0


@torch.no_grad()
def evaluate(head: EagleHead, batches: Iterable[RowBatch], num_draft_tokens: int) -> Evaluation:
    """Drafts greedily after every answer token and compares the drafts with the answer.

    The first draft token uses true features; later ones use the head's own tokens and hidden states.
    """
    found = Evaluation(Acceptance(), Acceptance())
    for batch in batches:
        drafted = _draft(head, batch, num_draft_tokens)
        for part, drafts in zip(answers_of(batch), drafted.split_with_sizes(list(batch.counts), dim=1), strict=True):
            found.of(part).add(accepted(drafts, part.next_token_ids))
    return found


def _draft(head: EagleHead, batch: RowBatch, num_draft_tokens: int) -> torch.Tensor:
    """The drafted tokens from each row as the target's ids, int64 ``[num_draft_tokens, num_rows]``."""
    tokens: list[torch.Tensor] = []

    def say(step: int, normed: torch.Tensor) -> torch.Tensor:
        parts = [head.logits(part).argmax(dim=-1) for part in torch.split(normed, _ROWS_AT_ONCE)]
        tokens.append(head.to_target_ids(torch.cat(parts)))
        return tokens[-1]

    *_, last = unroll(head, batch, num_draft_tokens, say)
    say(num_draft_tokens, last)
    return torch.stack(tokens)


def answers_of(batch: RowBatch) -> Iterator[Answer]:
    """Yields the answer of each sample of a batch."""
    counts = list(batch.counts)
    for next_ids, choices in zip(
        batch.next_token_ids.split_with_sizes(counts), batch.choices.split_with_sizes(counts), strict=True
    ):
        yield Answer(next_ids, choices)


def accepted(drafts: torch.Tensor, answer: torch.Tensor) -> Acceptance:
    """The acceptance of the chains drafted from each row, ``[num_draft_tokens, num_rows]``.

    Args:
        answer: the answer's token after each row's token, ``[num_rows]``.
    """
    found = Acceptance()
    alive = torch.ones(len(answer), dtype=torch.bool, device=answer.device)
    for step, draft in enumerate(drafts):
        num_reached = max(0, len(answer) - step)
        alive = alive[:num_reached] & (draft[:num_reached] == answer[step : step + num_reached])
        found.reached.append(num_reached)
        found.accepted.append(int(alive.sum()))
    return found
