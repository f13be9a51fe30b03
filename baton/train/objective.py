"""What a trainer minimises: the loss of a draft's guesses, step by step, against the target's distributions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.engine.device.uploads import TORCH_DTYPES
from baton.train.batches import RowBatch
from baton.train.settings import TrainingSettings
from baton.train.soft_loss import SoftTargets, soft_loss
from baton.train.vocabulary import draft_ids_of

_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of one batch.

    Attributes:
        loss: the loss over all steps.
        hits: by step, how often the draft's first choice was the target's.
        rows: by step, the number of guesses.
        num_rows: number of answer tokens in the batch.
    """

    loss: torch.Tensor
    hits: list[int]
    rows: list[int]
    num_rows: int


class Objective(Protocol):
    """A network that learns to draft, and its loss.

    Attributes:
        network: the network; parameters that do not require gradients stay fixed.
        num_steps: number of draft positions with a loss.
    """

    @property
    def network(self) -> nn.Module: ...

    @property
    def num_steps(self) -> int: ...

    def losses(self, indices: Sequence[int]) -> Losses:
        """The losses of the samples at these indices."""
        ...


class StepLoss:
    """The cross entropy of guesses against the target's own distribution; later steps have less weight.

    Args:
        vocabulary: the target's ids of the draft vocabulary; ``None`` means all ids.
        num_steps: number of consecutive guesses.
        decay: the loss of step ``s`` has the weight ``decay ** s``.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        vocabulary: torch.Tensor | None,
        num_steps: int,
        decay: float,
        settings: TrainingSettings,
    ) -> None:
        output: Any = target.get_output_embeddings()
        self._dtype = compute_dtype(settings, target)
        self._rows, self._bias = output.weight.detach(), None if output.bias is None else output.bias.detach()
        self._draft_ids: torch.Tensor | None = None
        if vocabulary is not None:
            chosen = vocabulary.to(target.device)
            self._rows, self._bias = self._rows[chosen], None if self._bias is None else self._bias[chosen]
            self._draft_ids = draft_ids_of(vocabulary, output.weight.shape[0]).to(target.device)
        self._num_steps = num_steps
        self._decay = decay
        self._tv_weight = settings.tv_weight

    def __call__(self, steps: Iterable[torch.Tensor], batch: RowBatch, lm_head: torch.Tensor) -> Losses:
        """The losses of a batch.

        Args:
            steps: the input of the lm_head at each step, ``[num_rows, hidden_size]``.
            lm_head: the draft's weights, ``[draft_vocab_size, hidden_size]``.
        """
        wanted = batch.choices if self._draft_ids is None else self._draft_ids[batch.choices]
        in_vocabulary = wanted >= 0
        hidden, indices, weights = [], [], []
        scale = 1.0 / sum(self._decay**step for step in range(self._num_steps))
        for step, states in enumerate(steps):
            rows = batch.rows_at(step)
            rows = rows[in_vocabulary[rows + step]]
            hidden.append(states[rows])
            indices.append(rows + step)
            weights.append(torch.full((len(rows),), scale * self._decay**step / max(1, len(rows))))
        targets = SoftTargets(self._target_probs(batch.final), torch.cat(indices), torch.cat(weights).to(wanted.device))
        loss, choices = soft_loss(torch.cat(hidden), lm_head, targets, self._tv_weight)
        counts = [len(rows) for rows in indices]
        hit = (choices == wanted[targets.indices]).split_with_sizes(counts)
        return Losses(loss, [int(part.sum()) for part in hit], counts, batch.num_rows)

    @torch.no_grad()
    def _target_probs(self, final: torch.Tensor) -> torch.Tensor:
        """The target's distribution over the draft vocabulary, in the draft's dtype."""
        parts = []
        for rows in torch.split(final, _ROWS_AT_ONCE):
            logits = torch.nn.functional.linear(rows, self._rows, self._bias)
            parts.append(logits.softmax(dim=-1, dtype=torch.float32).to(self._dtype))
        return torch.cat(parts)


def compute_dtype(settings: TrainingSettings, target: PreTrainedModel) -> torch.dtype:
    """The dtype in which the draft computes."""
    if settings.dtype != "auto":
        return TORCH_DTYPES[settings.dtype]
    return torch.bfloat16 if target.dtype == torch.bfloat16 else torch.float32
