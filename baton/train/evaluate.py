"""How much of what a draft says the target would have said: drafting as while serving, from every position at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from baton.engine.draft.eagle.head import EagleHead
from baton.train.batches import RowBatch
from baton.train.tree_evaluation import TreeAcceptance
from baton.train.unroll import unroll

# An answer sampled at temperature 0.8 has far fewer of the likeliest tokens; a greedy one misses some by rounding.
_GREEDY_SHARE = 0.97
_ROWS_AT_ONCE = 512


@dataclass(slots=True)
class Acceptance:
    """Counts over chains that were drafted from each position of some answers.

    Attributes:
        reached: by draft position: how often the answer went on that far.
        accepted: by draft position: how often this token and all before it were the answer's.
    """

    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def unconditional(self) -> list[float]:
        """By draft position, the share of chains that were accepted that far."""
        return [share(good, all_) for good, all_ in zip(self.accepted, self.reached, strict=True)]

    @property
    def conditional(self) -> list[float]:
        """By draft position, the share of accepted tokens where the one before was accepted."""
        rates = self.unconditional
        return [share(rate, before) for rate, before in zip(rates, [1.0, *rates], strict=False)]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target forward (τ), the target's own included."""
        return 1.0 + sum(self.unconditional)

    def add(self, other: Acceptance) -> None:
        """Counts another one's chains too."""
        size = len(other.reached)
        self.reached = [a + b for a, b in zip(self.reached or [0] * size, other.reached, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted or [0] * size, other.accepted, strict=True)]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target said behind each row of one sample, and what it found likeliest there; int64 ``[num_rows]``."""

    next_token_ids: torch.Tensor
    choices: torch.Tensor

    @property
    def is_greedy(self) -> bool:
        """Whether it was given at temperature 0, as far as one can see."""
        return float((self.choices == self.next_token_ids).float().mean()) >= _GREEDY_SHARE


@dataclass(frozen=True, slots=True)
class Evaluation:
    """
    Attributes:
        greedy: over answers that the target gave at temperature 0.
        sampled: over the others, where the draft has to hit what chance made of it.
        greedy_tree, sampled_tree: the same with trees, for drafts whose guesses make one.
    """

    greedy: Acceptance
    sampled: Acceptance
    greedy_tree: TreeAcceptance | None = None
    sampled_tree: TreeAcceptance | None = None

    def of(self, answer: Answer) -> Acceptance:
        """Where the chains of this answer count."""
        return self.greedy if answer.is_greedy else self.sampled


def share(part: float, whole: float) -> float:
    """0 of nothing."""
    return part / whole if whole else 0.0


@torch.no_grad()
def evaluate(head: EagleHead, batches: Iterable[RowBatch], num_draft_tokens: int) -> Evaluation:
    """Lets the head draft greedily behind every answer token, from true features, with its own tokens and its own
    hidden states from the second draft token on; compares with what the target said.
    """
    found = Evaluation(Acceptance(), Acceptance())
    for batch in batches:
        drafted = _draft(head, batch, num_draft_tokens)
        for part, drafts in zip(answers_of(batch), drafted.split_with_sizes(list(batch.counts), dim=1), strict=True):
            found.of(part).add(accepted(drafts, part.next_token_ids))
    return found


def _draft(head: EagleHead, batch: RowBatch, num_draft_tokens: int) -> torch.Tensor:
    """The target's ids of what is drafted from each row, int64 ``[num_draft_tokens, num_rows]``."""
    tokens: list[torch.Tensor] = []

    def say(step: int, normed: torch.Tensor) -> torch.Tensor:
        parts = [head.logits(part).argmax(dim=-1) for part in torch.split(normed, _ROWS_AT_ONCE)]
        tokens.append(head.to_target_ids(torch.cat(parts)))
        return tokens[-1]

    *_, last = unroll(head, batch, num_draft_tokens, say)
    say(num_draft_tokens, last)
    return torch.stack(tokens)


def answers_of(batch: RowBatch) -> Iterator[Answer]:
    """Of each sample."""
    counts = list(batch.counts)
    for next_ids, choices in zip(
        batch.next_token_ids.split_with_sizes(counts), batch.choices.split_with_sizes(counts), strict=True
    ):
        yield Answer(next_ids, choices)


def accepted(drafts: torch.Tensor, said: torch.Tensor) -> Acceptance:
    """Of the chains ``[num_draft_tokens, num_rows]`` that were drafted from each row.

    Args:
        said: what the target said behind each row's token, ``[num_rows]``.
    """
    found = Acceptance()
    alive = torch.ones(len(said), dtype=torch.bool, device=said.device)
    for step, draft in enumerate(drafts):
        num_reached = max(0, len(said) - step)
        alive = alive[:num_reached] & (draft[:num_reached] == said[step : step + num_reached])
        found.reached.append(num_reached)
        found.accepted.append(int(alive.sum()))
    return found
