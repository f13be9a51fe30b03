"""Trains an EAGLE-3.1 head for a target, from answers of that target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from baton.core.errors import UnsupportedModelError
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle, save_eagle3
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.models.model_loader import LoadedModel
from baton.train.card import Description
from baton.train.evaluate import Evaluation, evaluate
from baton.train.head_init import head_settings, initial_head, with_rows
from baton.train.objective import Losses, StepLoss, compute_dtype
from baton.train.run import HeldOut, TrainingData
from baton.train.settings import DRAFT_VOCAB_SIZE, Eagle3Settings
from baton.train.unroll import unroll
from baton.train.vocabulary import choose_vocabulary, count_answer_tokens, coverage

_SAMPLES_TO_FIT = 256


class Eagle3Method:
    """Implements :class:`baton.train.run.Method`.

    Raises:
        ConfigError: the head to start from is missing or broken.
        UnsupportedModelError: the head is for another target, or the target is too shallow and ``feature_layers`` are
            not given.
    """

    def __init__(self, settings: Eagle3Settings, target: LoadedModel) -> None:
        self.settings = settings
        self._target = target
        self._start = None if settings.start_from is None else _load_start(settings.start_from, target)
        size = min(settings.draft_vocab_size or DRAFT_VOCAB_SIZE, target.vocab_size)
        self._shape = head_settings(target.model, settings, size) if self._start is None else self._start.settings
        self._coverage = 0.0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._shape.feature_layers

    def objective(self, data: TrainingData) -> _Objective:
        target = self._target
        counts = count_answer_tokens(data.samples[index] for index in data.training)
        head = self._new_head(counts, data) if self._start is None else self._further_head(self._start, counts)
        vocabulary = head.to_target_ids(torch.arange(head.draft_vocab_size))
        self._shape, self._coverage = head.settings, coverage(counts, vocabulary)
        return _Objective(head.to(target.model.device), self.settings, target, vocabulary, data)

    def _new_head(self, counts: Counter[int], data: TrainingData) -> EagleHead:
        target, size = self._target, self._shape.draft_vocab_size
        vocabulary = choose_vocabulary(counts, size, range(target.vocab_size), target.eos_token_ids)
        fit_on = data.training[:_SAMPLES_TO_FIT]
        chosen = [data.samples[index] for index in fit_on]
        states = data.states.load(fit_on)
        return initial_head(self._shape, target.model, vocabulary, chosen, states, self.settings.seed)

    def _further_head(self, start: EagleHead, counts: Counter[int]) -> EagleHead:
        """``start``, perhaps with fewer tokens."""
        known = start.to_target_ids(torch.arange(start.draft_vocab_size))
        size = self.settings.draft_vocab_size or len(known)
        kept = choose_vocabulary(counts, size, known.tolist(), self._target.eos_token_ids)
        return with_rows(start, self._target.model, torch.isin(known, kept).nonzero().squeeze(1))

    def write(self, network: nn.Module, folder: Path, target_name: str) -> None:
        head: Any = network.to(torch.bfloat16)
        save_eagle3(head, folder, target_name)

    def evaluate(self, folder: Path, held_out: HeldOut) -> Evaluation:
        model = self._target.model
        head = load_eagle(folder, model, compute_dtype(self.settings, model), model.device)
        return evaluate(head, held_out.batches(), self.settings.num_draft_tokens)

    def describe(self, network: nn.Module) -> Description:
        shape = self._shape
        return Description(
            title="EAGLE-3.1 draft head",
            tag="eagle3",
            text=self._flags() if self._start is None else f"{self._flags()} Trained further from an earlier head.",
            rows=(("draft vocabulary", f"{shape.draft_vocab_size:,} tokens, {self._coverage:.2%} of the answers"),),
            settings={
                "draft_vocab_size": shape.draft_vocab_size,
                "feature_layers": list(shape.feature_layers),
                "num_kv_heads": shape.layers.num_kv_heads,
            },
        )

    def _flags(self) -> str:
        found = {
            "`fc_norm`": self._shape.fc_norm,
            "`norm_output` (the head is fed its output after the final norm)": self._shape.norm_output,
        }
        return f"Flags: {', '.join(text for text, is_set in found.items() if is_set) or 'none'}."


def _load_start(reference: str, target: LoadedModel) -> EagleHead:
    head = load_eagle(reference, target.model, torch.float32, torch.device("cpu"))
    if head.settings.version != 3:
        raise UnsupportedModelError(
            f"training: {reference} is an EAGLE-{head.settings.version} head, but only EAGLE-3 heads can be "
            "trained. Start from such a head, or leave out --from."
        )
    problem = None
    if not head.settings.own_lm_head:
        problem = "it has no lm_head of its own"
    elif head.settings.layers.qk_norm:
        problem = "its attention normalizes queries and keys, which the common format of such heads does not support"
    elif len(head.feature_layer_choices) > 1:
        problem = "it does not state which hidden states of the target it reads"
    if problem is not None:
        raise UnsupportedModelError(f"training: {reference} cannot be trained further: {problem}. Leave out --from.")
    return head


class _Objective:
    """Implements :class:`baton.train.objective.Objective`: several consecutive guesses from every position."""

    def __init__(
        self,
        head: EagleHead,
        settings: Eagle3Settings,
        target: LoadedModel,
        vocabulary: torch.Tensor,
        data: TrainingData,
    ) -> None:
        self.network = head.requires_grad_(True)
        self.num_steps = settings.num_ttt_steps
        self._loss = StepLoss(target.model, vocabulary, self.num_steps, settings.step_decay, settings)
        self._data = data

    def losses(self, indices: Sequence[int]) -> Losses:
        batch = self._data.rows(indices)
        steps: Iterator[torch.Tensor] = unroll(self.network, batch, self.num_steps)
        return self._loss(steps, batch, self.network.lm_head.weight)
