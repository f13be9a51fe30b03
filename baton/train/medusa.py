"""Trains Medusa heads for a frozen target on the target's answers (Medusa-1, arXiv 2401.10774).

All heads share one lm_head, which starts as the target's own. The blocks of each head add nothing at first. A head
learns from the target's whole distribution at the position that it guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from baton.engine.draft.medusa import medusa_layout
from baton.engine.draft.medusa.heads import MAX_RANKS, MedusaHeads, load_medusa, save_medusa
from baton.engine.models.model_loader import LoadedModel
from baton.train.batches import RowBatch
from baton.train.card import Description
from baton.train.evaluate import Acceptance, Evaluation, accepted, answers_of
from baton.train.objective import Losses, StepLoss, compute_dtype
from baton.train.run import HeldOut, TrainingData
from baton.train.settings import MedusaSettings
from baton.train.tree_evaluation import RankCounts
from baton.train.vocabulary import choose_vocabulary, count_answer_tokens, coverage

_ROWS_AT_ONCE = 512


class MedusaMethod:
    """Implements :class:`baton.train.run.Method`."""

    feature_layers = ()

    def __init__(self, settings: MedusaSettings, target: LoadedModel) -> None:
        self.settings = settings
        self._target = target
        self._coverage = 0.0

    def objective(self, data: TrainingData) -> _Objective:
        target = self._target
        counts = count_answer_tokens(data.samples[index] for index in data.training)
        size = self.settings.draft_vocab_size
        vocabulary = choose_vocabulary(counts, size, range(target.vocab_size), target.eos_token_ids)
        self._coverage = coverage(counts, vocabulary)
        return _Objective(initial_heads(self.settings, target, vocabulary), self.settings, target, vocabulary, data)

    def write(self, network: nn.Module, folder: Path, target_name: str) -> None:
        heads: Any = network.to(torch.bfloat16)
        save_medusa(heads, folder, target_name)

    def evaluate(self, folder: Path, held_out: HeldOut) -> Evaluation:
        model = self._target.model
        heads = load_medusa(folder, model, compute_dtype(self.settings, model), model.device)
        return evaluate(heads, held_out.batches(), self.settings.num_tree_tokens)

    def describe(self, network: nn.Module) -> Description:
        settings = self.settings
        size = min(settings.draft_vocab_size, self._target.vocab_size)
        return Description(
            title="Medusa heads",
            tag="medusa",
            text="The target itself was not trained. All heads share one lm_head.",
            rows=(
                ("heads", f"{settings.num_heads}, each of {settings.num_blocks} residual blocks"),
                ("draft vocabulary", f"{size:,} tokens, {self._coverage:.2%} of the answers"),
            ),
            settings={"draft_vocab_size": size},
        )


@torch.no_grad()
def initial_heads(settings: MedusaSettings, target: LoadedModel, vocabulary: torch.Tensor) -> MedusaHeads:
    """Creates float32 heads on the target's device, which initially all compute the target's own lm_head."""
    output: Any = target.model.get_output_embeddings()
    shape = medusa_layout.MedusaSettings(
        hidden_size=output.weight.shape[1],
        num_heads=settings.num_heads,
        num_blocks=settings.num_blocks,
        bias=True,
        draft_vocab_size=len(vocabulary),
        num_lm_heads=1,
        maps_vocabulary=len(vocabulary) < target.vocab_size,
    )
    heads = MedusaHeads(shape, target.model).float()
    for parameter in heads.blocks.parameters():
        parameter.zero_()
    shared: Any = heads.lm_heads[0]
    shared.weight.copy_(output.weight[vocabulary.to(output.weight.device)])
    if shape.maps_vocabulary:
        heads.token_map.copy_(vocabulary)
    return heads.to(target.model.device)


@torch.no_grad()
def evaluate(heads: MedusaHeads, batches: Iterable[RowBatch], num_tree_tokens: int) -> Evaluation:
    """Guesses after every answer token, as chains of each head's first guess and as trees."""
    chains = {True: Acceptance(), False: Acceptance()}
    ranks = {is_greedy: RankCounts(heads.num_heads, MAX_RANKS) for is_greedy in chains}
    for batch in batches:
        guesses = _guesses(heads, batch.before)
        for answer, own in zip(answers_of(batch), guesses.split_with_sizes(list(batch.counts), dim=1), strict=True):
            chains[answer.is_greedy].add(accepted(own[:, :, 0], answer.next_token_ids))
            ranks[answer.is_greedy].add(_right_ranks(own, answer.next_token_ids))
    return Evaluation(
        chains[True], chains[False], ranks[True].acceptance(num_tree_tokens), ranks[False].acceptance(num_tree_tokens)
    )


class _Objective:
    """Implements :class:`baton.train.objective.Objective`: one guess of each head from every position."""

    def __init__(
        self,
        heads: MedusaHeads,
        settings: MedusaSettings,
        target: LoadedModel,
        vocabulary: torch.Tensor,
        data: TrainingData,
    ) -> None:
        self.network = heads.requires_grad_(True)
        self.num_steps = settings.num_heads
        heads.lm_heads.requires_grad_(settings.train_lm_head)
        self._loss = StepLoss(target.model, vocabulary, self.num_steps, settings.step_decay, settings)
        self._data = data

    def losses(self, indices: Sequence[int]) -> Losses:
        batch = self._data.rows(indices)
        hidden = batch.before.to(self.network.dtype)
        steps = (block(hidden) for block in self.network.blocks)
        lm_head: Any = self.network.lm_heads[0]
        return self._loss(steps, batch, lm_head.weight)


def _guesses(heads: MedusaHeads, hidden: torch.Tensor) -> torch.Tensor:
    """Each head's likeliest tokens as the target's ids, int64 ``[num_heads, num_rows, num_ranks]``."""
    num_ranks = min(MAX_RANKS, heads.draft_vocab_size)
    parts = [heads(part.to(heads.dtype)).topk(num_ranks, dim=-1).indices for part in torch.split(hidden, _ROWS_AT_ONCE)]
    return heads.to_target_ids(torch.cat(parts, dim=1))


def _right_ranks(guesses: torch.Tensor, answer: torch.Tensor) -> list[list[int]]:
    """For each position that is followed by enough of the answer, the rank of each head's right guess."""
    num_heads, num_rows, _ = guesses.shape
    if (num_whole := num_rows - num_heads + 1) < 1:
        return []
    wanted = torch.stack([answer[head : head + num_whole] for head in range(num_heads)])
    hits = guesses[:, :num_whole] == wanted[:, :, None]
    ranks = torch.where(hits.any(dim=-1), hits.int().argmax(dim=-1), MAX_RANKS)
    found: list[list[int]] = ranks.T.tolist()
    return found
