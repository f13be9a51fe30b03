"""The samples of a training step, and the rows that the head sees of them.

A sample with a prompt of 3 tokens and the answer "d e f g" (row i has feature i and token i + 1, see the EAGLE head):

tokens      a   b   c   d   e   f   g
row             context | 0   1   2        row 0: feature of c, token d; predicts e, as the target does after d
                (only KV)                  at step s, row j has the token of row j + s and predicts what row j + s does
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.train.dataset import Sample
from baton.train.target import SampleStates


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The concatenated rows of several samples.

    Attributes:
        context_features: features of the context rows, which are only attended to, ``[num_context, num_features]``.
        context_token_ids: int64 ``[num_context]``.
        context_positions: int64 ``[num_context]``.
        context_counts: number of context rows of each sample.
        features: features of the predicting rows, ``[num_rows, num_features]``.
        token_ids: int64 ``[num_rows]``.
        positions: int64 ``[num_rows]``.
        counts: number of predicting rows of each sample.
        next_token_ids: the answer's token after each row's token, int64 ``[num_rows]``.
        before: the target's hidden state, after its final norm, one token before each row's,
            ``[num_rows, hidden_size]``.
        final: the same hidden state at each row's token.
        choices: the target's likeliest token after each row's token, int64 ``[num_rows]``.
        num_left: number of rows of the same sample, beginning here, int64 ``[num_rows]``; at step ``s``, rows with
            more than ``s`` predict a token.
    """

    context_features: torch.Tensor
    context_token_ids: torch.Tensor
    context_positions: torch.Tensor
    context_counts: tuple[int, ...]
    features: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    counts: tuple[int, ...]
    next_token_ids: torch.Tensor
    before: torch.Tensor
    final: torch.Tensor
    choices: torch.Tensor
    num_left: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def rows_at(self, step: int) -> torch.Tensor:
        """The rows that predict a token at this step, int64."""
        return (self.num_left > step).nonzero()[:, 0]

    def shifted(self, step: int) -> torch.Tensor:
        """The row ``step`` rows further of the same sample, int64 ``[num_rows]``; the row itself if there is none."""
        rows = torch.arange(self.num_rows, device=self.num_left.device)
        return torch.where(self.num_left > step, rows + step, rows)


def num_rows_of(sample: Sample) -> int:
    """The number of predicting rows of a sample."""
    return max(0, len(sample.token_ids) - 1 - max(1, sample.num_prompt_tokens))


def make_rows(samples: Sequence[Sample], states: Sequence[SampleStates]) -> RowBatch:
    """Builds the rows of samples on the device of their states. Every sample must have at least one row."""
    device = states[0].features.device
    firsts = [max(0, sample.num_prompt_tokens - 1) for sample in samples]
    counts = tuple(num_rows_of(sample) for sample in samples)
    tokens = [torch.tensor(sample.token_ids, dtype=torch.int64) for sample in samples]
    spans = [(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    parts = list(zip(states, tokens, spans, strict=True))
    return RowBatch(
        context_features=torch.cat([state.features[:start] for state, _, (start, _) in parts]),
        context_token_ids=torch.cat([token[1 : start + 1] for _, token, (start, _) in parts]).to(device),
        context_positions=torch.cat([torch.arange(first) for first in firsts]).to(device),
        context_counts=tuple(firsts),
        features=torch.cat([state.features[start:end] for state, _, (start, end) in parts]),
        token_ids=torch.cat([token[start + 1 : end + 1] for _, token, (start, end) in parts]).to(device),
        positions=torch.cat([torch.arange(start, end) for start, end in spans]).to(device),
        counts=counts,
        next_token_ids=torch.cat([token[start + 2 : end + 2] for _, token, (start, end) in parts]).to(device),
        before=torch.cat([state.final[: end - start] for state, _, (start, end) in parts]),
        final=torch.cat([state.final[1 : end - start + 1] for state, _, (start, end) in parts]),
        choices=torch.cat([state.choices[1 : end - start + 1] for state, _, (start, end) in parts]),
        num_left=torch.cat([torch.arange(count, 0, -1) for count in counts]).to(device),
    )


def split_samples(samples: Sequence[Sample], held_out_share: float, seed: int) -> tuple[list[int], list[int]]:
    """Splits samples into indices to train on and to evaluate on. Samples too short to predict anything are left out.

    A sample's side depends only on its prompt and the seed, so that answers to the same prompt stay together and
    samples keep their side when a dataset grows. If one side would be empty, one sample is moved there.
    """
    training: list[int] = []
    held_out: list[int] = []
    for index, sample in enumerate(samples):
        if num_rows_of(sample) < 1:
            continue
        chooser = random.Random(f"{seed}:{sample.token_ids[: sample.num_prompt_tokens]}")
        (held_out if chooser.random() < held_out_share else training).append(index)
    if not held_out and len(training) > 1:
        held_out.append(training.pop())
    if not training and len(held_out) > 1:
        training.append(held_out.pop())
    return training, held_out


def epoch_batches(
    indices: Sequence[int], samples: Sequence[Sample], rows_per_batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """Every index once, in batches of about ``rows_per_batch`` rows, shuffled by ``seed`` and ``epoch`` alone."""
    shuffled = list(indices)
    random.Random(f"{seed}:{epoch}").shuffle(shuffled)
    return group_by_rows(shuffled, samples, rows_per_batch)


def group_by_rows(indices: Sequence[int], samples: Sequence[Sample], rows_per_batch: int) -> list[list[int]]:
    """Groups indices, in the given order, into batches of about ``rows_per_batch`` rows."""
    batches: list[list[int]] = []
    num_rows = rows_per_batch
    for index in indices:
        if num_rows >= rows_per_batch:
            batches.append([])
            num_rows = 0
        batches[-1].append(index)
        num_rows += num_rows_of(samples[index])
    return batches
