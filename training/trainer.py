"""The training loop: batches, losses of unrolled steps, optimizer, reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from engine.draft.eagle import EagleHead
from engine.kv_cache import TORCH_DTYPES
from training.batches import RowBatch, epoch_batches, group_by_rows, make_rows, num_rows_of
from training.dataset import Sample
from training.optimizer import MasterAdamW, learning_rate_at
from training.settings import Eagle3Settings
from training.soft_loss import SoftTargets, soft_loss
from training.states import States
from training.training_state import TrainingState
from training.unroll import unroll
from training.vocabulary import draft_ids_of

_HELD_OUT_ROWS = 16_384
_ROWS_AT_ONCE = 512
_SPEED_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class Progress:
    """What a run is at.

    Attributes:
        stage: ``states`` runs the target over the data, ``training`` and ``held_out`` report losses.
        progress: of the stage, from 0 to 1.
        loss: since the last report, or over held-out answers.
        agreement: by unrolled step, how often the head's first choice is the target's.
        tokens_per_s: tokens of the data in ``states``, answer tokens in ``training``.
        eta_s: seconds to the end of the stage.
    """

    stage: Literal["states", "training", "held_out"]
    progress: float = 0.0
    num_steps: int = 0
    epoch: int = 0
    loss: float = 0.0
    agreement: tuple[float, ...] = ()
    learning_rate: float = 0.0
    gradient_norm: float = 0.0
    tokens_per_s: float = 0.0
    eta_s: float = 0.0


class _Sums:
    """Losses and hits of several batches."""

    def __init__(self, num_steps: int) -> None:
        self.loss = 0.0
        self.num_batches = 0
        self.hits = [0] * num_steps
        self.rows = [0] * num_steps

    def add(self, loss: float, hits: Sequence[int], rows: Sequence[int]) -> None:
        self.loss += loss
        self.num_batches += 1
        self.hits = [a + b for a, b in zip(self.hits, hits, strict=True)]
        self.rows = [a + b for a, b in zip(self.rows, rows, strict=True)]

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.num_batches)

    @property
    def agreement(self) -> tuple[float, ...]:
        return tuple(hits / max(1, rows) for hits, rows in zip(self.hits, self.rows, strict=True))


class Eagle3Trainer:
    """One run.

    Args:
        head: float32, with its first weights. Computes in the settings' dtype from now on.
        vocabulary: the target's ids of the draft vocabulary.
        training: indices of samples to learn from.
        held_out: indices of samples that only losses are computed on.

    Attributes:
        state: where the run stands.
        dtype: what the head computes in.
    """

    def __init__(
        self,
        head: EagleHead,
        target: PreTrainedModel,
        vocabulary: torch.Tensor,
        samples: Sequence[Sample],
        training: Sequence[int],
        held_out: Sequence[int],
        states: States,
        settings: Eagle3Settings,
        report: Callable[[Progress], None],
    ) -> None:
        self.state = TrainingState()
        self.dtype = _compute_dtype(settings, target)
        initial = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
        self.head = head.to(self.dtype).train().requires_grad_(True)
        self.optimizer = MasterAdamW(self.head, initial, settings.weight_decay, settings.max_grad_norm)
        output: Any = target.get_output_embeddings()
        chosen = vocabulary.to(target.device)
        self._target_rows = output.weight.detach()[chosen]
        self._target_bias = None if output.bias is None else output.bias.detach()[chosen]
        self._draft_ids = draft_ids_of(vocabulary, output.weight.shape[0]).to(target.device)
        self._samples = samples
        self._training = training
        self._held_out = _up_to_rows(held_out, samples, _HELD_OUT_ROWS)
        self._states = states
        self._settings = settings
        self._report = report

    def resume(self, state: TrainingState, optimizer: dict[str, Any]) -> None:
        """Goes on where another trainer of the same settings was."""
        self.state = state
        self.optimizer.load_state_dict(optimizer)

    def run(self, start: float, save: Callable[[], None]) -> None:
        """Until the epochs or the budget are over.

        Args:
            start: when the work of this process began, by ``time.perf_counter()``.
            save: is called every ``save_every_s``, and at the end.
        """
        settings, state = self._settings, self.state
        start -= state.elapsed_s
        if state.num_steps == 0:
            state.started_s = time.perf_counter() - start
        sums, speed, last_saved = _Sums(settings.num_ttt_steps), _Speed(), time.perf_counter()
        batches = self._batches(state.epoch)
        while True:
            state.elapsed_s = time.perf_counter() - start
            progress = self._progress(len(batches))
            if progress >= 1.0:
                break
            batch = self._load(batches[state.next_batch])
            rate = learning_rate_at(progress, state.num_steps, settings.learning_rate, settings.warmup_steps)
            loss, hits, rows = self._losses(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = self.optimizer.step(rate)
            sums.add(float(loss.detach()), hits, rows)
            speed.add(batch.num_rows)
            state.num_rows += batch.num_rows
            state.num_steps += 1
            state.next_batch += 1
            if state.next_batch == len(batches):
                state.epoch, state.next_batch = state.epoch + 1, 0
                batches = self._batches(state.epoch)
            state.elapsed_s = time.perf_counter() - start
            progress = self._progress(len(batches))
            if state.num_steps % settings.report_every_steps == 0:
                self._tell("training", sums, progress, rate, norm, speed.rows_per_s)
                sums = _Sums(settings.num_ttt_steps)
            if state.num_steps % settings.evaluate_every_steps == 0:
                self._tell("held_out", self.held_out_losses(), progress)
            if time.perf_counter() - last_saved >= settings.save_every_s:
                save()
                last_saved = time.perf_counter()
        self._tell("held_out", self.held_out_losses(), 1.0)
        save()

    def trained_head(self) -> EagleHead:
        """The head with the float32 weights that it has learned."""
        head = self.head.float().eval().requires_grad_(False)
        head.load_state_dict(self.optimizer.weights(), strict=False)
        return head

    @torch.no_grad()
    def held_out_losses(self) -> _Sums:
        """Over held-out answers, with the weights of now."""
        sums = _Sums(self._settings.num_ttt_steps)
        for group in group_by_rows(self._held_out, self._samples, self._settings.rows_per_batch):
            loss, hits, rows = self._losses(self._load(group))
            sums.add(float(loss), hits, rows)
        return sums

    def _losses(self, batch: RowBatch) -> tuple[torch.Tensor, list[int], list[int]]:
        """The loss over all steps, and by step the target's first choices that were hit, and the rows."""
        settings = self._settings
        wanted = self._draft_ids[batch.choices]
        can_say = wanted >= 0
        hidden, indices, weights = [], [], []
        scale = 1.0 / sum(settings.step_decay**step for step in range(settings.num_ttt_steps))
        for step, normed in enumerate(unroll(self.head, batch, settings.num_ttt_steps)):
            rows = batch.rows_at(step)
            rows = rows[can_say[rows + step]]
            hidden.append(normed[rows])
            indices.append(rows + step)
            weights.append(torch.full((len(rows),), scale * settings.step_decay**step / max(1, len(rows))))
        targets = SoftTargets(self._target_probs(batch.final), torch.cat(indices), torch.cat(weights).to(wanted.device))
        loss, choices = soft_loss(torch.cat(hidden), self.head.lm_head.weight, targets, settings.tv_weight)
        counts = [len(rows) for rows in indices]
        hit = (choices == wanted[targets.indices]).split_with_sizes(counts)
        return loss, [int(part.sum()) for part in hit], counts

    @torch.no_grad()
    def _target_probs(self, final: torch.Tensor) -> torch.Tensor:
        """The target's distribution over the draft vocabulary, in the head's dtype."""
        parts = []
        for rows in torch.split(final, _ROWS_AT_ONCE):
            logits = torch.nn.functional.linear(rows, self._target_rows, self._target_bias)
            parts.append(logits.softmax(dim=-1, dtype=torch.float32).to(self.dtype))
        return torch.cat(parts)

    def _load(self, indices: Sequence[int]) -> RowBatch:
        return make_rows([self._samples[index] for index in indices], self._states.load(indices))

    def _batches(self, epoch: int) -> list[list[int]]:
        settings = self._settings
        return epoch_batches(self._training, self._samples, settings.rows_per_batch, settings.seed, epoch)

    def _progress(self, num_batches: int) -> float:
        settings, state = self._settings, self.state
        of_epochs = (state.epoch + state.next_batch / num_batches) / settings.num_epochs
        if settings.budget_s is None:
            return of_epochs
        # Of the time that was left when the first step began: before that, the learning rate had nothing to fall from.
        left = max(1e-9, settings.budget_s - state.started_s)
        return max(of_epochs, (state.elapsed_s - state.started_s) / left)

    def _tell(
        self,
        stage: Literal["training", "held_out"],
        sums: _Sums,
        progress: float,
        learning_rate: float = 0.0,
        gradient_norm: float = 0.0,
        rows_per_s: float = 0.0,
    ) -> None:
        state = self.state
        spent = state.elapsed_s - state.started_s
        told = Progress(
            stage=stage,
            progress=min(1.0, progress),
            num_steps=state.num_steps,
            epoch=state.epoch,
            loss=sums.mean_loss,
            agreement=sums.agreement,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            tokens_per_s=rows_per_s,
            eta_s=spent * max(0.0, 1.0 - progress) / max(progress, 1e-9),
        )
        state.log.append(asdict(told) | {"agreement": list(told.agreement), "elapsed_s": state.elapsed_s})
        self._report(told)


class _Speed:
    """Rows per second, of late."""

    def __init__(self) -> None:
        self.rows_per_s = 0.0
        self._last = time.perf_counter()

    def add(self, num_rows: int) -> None:
        now = time.perf_counter()
        speed = num_rows / max(1e-9, now - self._last)
        self.rows_per_s = speed if not self.rows_per_s else _SPEED_DECAY * self.rows_per_s + (1 - _SPEED_DECAY) * speed
        self._last = now


def _compute_dtype(settings: Eagle3Settings, target: PreTrainedModel) -> torch.dtype:
    if settings.dtype != "auto":
        return TORCH_DTYPES[settings.dtype]
    return torch.bfloat16 if target.dtype == torch.bfloat16 else torch.float32


def _up_to_rows(indices: Sequence[int], samples: Sequence[Sample], num_rows: int) -> list[int]:
    chosen: list[int] = []
    for index in indices:
        if num_rows <= 0:
            break
        num_rows -= num_rows_of(samples[index])
        chosen.append(index)
    return chosen
