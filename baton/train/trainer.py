"""The training loop: batches, losses, optimizer, reports. An objective defines what is learned."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from baton.train.batches import epoch_batches, group_by_rows, num_rows_of
from baton.train.dataset import Sample
from baton.train.objective import Losses, Objective
from baton.train.optimizer import MasterAdamW, learning_rate_at
from baton.train.settings import TrainingSettings
from baton.train.stopping import Stop, StoppedError, check, never
from baton.train.training_state import TrainingState

_HELD_OUT_ROWS = 16_384
_SPEED_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run.

    Attributes:
        stage: ``states`` runs the target over the data, ``training`` and ``held_out`` report losses, ``evaluation``
            drafts on held-out answers.
        progress: progress of the stage, from 0 to 1.
        loss: mean loss since the last report, or on held-out answers.
        agreement: by draft position, how often the draft's first choice is the target's.
        tokens_per_s: tokens of the data in ``states``, answer tokens in ``training``.
        eta_s: seconds to the end of the stage.
    """

    stage: Literal["states", "training", "held_out", "evaluation"]
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
    """Sums of losses and hits over several batches."""

    def __init__(self, num_steps: int) -> None:
        self.loss = 0.0
        self.num_batches = 0
        self.hits = [0] * num_steps
        self.rows = [0] * num_steps

    def add(self, found: Losses) -> None:
        self.loss += float(found.loss.detach())
        self.num_batches += 1
        self.hits = [a + b for a, b in zip(self.hits, found.hits, strict=True)]
        self.rows = [a + b for a, b in zip(self.rows, found.rows, strict=True)]

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.num_batches)

    @property
    def agreement(self) -> tuple[float, ...]:
        return tuple(hits / max(1, rows) for hits, rows in zip(self.hits, self.rows, strict=True))


class Trainer:
    """The training loop of one run.

    Args:
        objective: has the initial weights of its network in float32. The network is then cast to ``dtype``.
        training: indices of the training samples.
        held_out: indices of samples for which only losses are computed.
        stop: checked between two steps.

    Attributes:
        state: the state of the run.
    """

    def __init__(
        self,
        objective: Objective,
        dtype: torch.dtype,
        samples: Sequence[Sample],
        training: Sequence[int],
        held_out: Sequence[int],
        settings: TrainingSettings,
        report: Callable[[Progress], None],
        stop: Stop = never,
    ) -> None:
        self.state = TrainingState()
        self._objective = objective
        initial = {name: parameter.detach().clone() for name, parameter in objective.network.named_parameters()}
        self._network = _cast(objective.network, dtype).train()
        self.optimizer = MasterAdamW(self._network, initial, settings.weight_decay, settings.max_grad_norm)
        self._samples = samples
        self._training = training
        self._held_out = _up_to_rows(held_out, samples, _HELD_OUT_ROWS)
        self._settings = settings
        self._report = report
        self._stop = stop

    def resume(self, state: TrainingState, optimizer: dict[str, Any]) -> None:
        """Restores the state of another trainer with the same settings."""
        self.state = state
        self.optimizer.load_state_dict(optimizer)

    def run(self, start: float, save: Callable[[], None]) -> None:
        """Trains until the end of the epochs or of the budget.

        Args:
            start: when this process began to work, by ``time.perf_counter()``.
            save: called every ``save_every_s`` seconds and at the end.

        Raises:
            StoppedError: ``stop`` returned True; the state has been saved.
        """
        settings, state = self._settings, self.state
        start -= state.elapsed_s
        if state.num_steps == 0:
            state.started_s = time.perf_counter() - start
        sums, speed, last_saved = _Sums(self._objective.num_steps), _Speed(), time.perf_counter()
        batches = self._batches(state.epoch)
        while True:
            state.elapsed_s = time.perf_counter() - start
            progress = self._progress(len(batches))
            if progress >= 1.0:
                break
            self._save_if_stopped(save)
            rate = learning_rate_at(progress, state.num_steps, settings.learning_rate, settings.warmup_steps)
            found = self._objective.losses(batches[state.next_batch])
            found.loss.backward()  # type: ignore[no-untyped-call]
            norm = self.optimizer.step(rate)
            sums.add(found)
            speed.add(found.num_rows)
            state.num_rows += found.num_rows
            state.num_steps += 1
            state.next_batch += 1
            if state.next_batch == len(batches):
                state.epoch, state.next_batch = state.epoch + 1, 0
                batches = self._batches(state.epoch)
            state.elapsed_s = time.perf_counter() - start
            progress = self._progress(len(batches))
            if state.num_steps % settings.report_every_steps == 0:
                self._report_progress("training", sums, progress, rate, norm, speed.rows_per_s)
                sums = _Sums(self._objective.num_steps)
            if state.num_steps % settings.evaluate_every_steps == 0:
                self._report_progress("held_out", self.held_out_losses(), progress)
            if time.perf_counter() - last_saved >= settings.save_every_s:
                save()
                last_saved = time.perf_counter()
        self._report_progress("held_out", self.held_out_losses(), 1.0)
        save()

    def trained_network(self) -> nn.Module:
        """The network with its trained weights in float32."""
        network = _cast(self._network, torch.float32).eval().requires_grad_(False)
        network.load_state_dict(self.optimizer.weights(), strict=False)
        return network

    @torch.no_grad()
    def held_out_losses(self) -> _Sums:
        """The losses on held-out answers with the current weights."""
        sums = _Sums(self._objective.num_steps)
        for group in group_by_rows(self._held_out, self._samples, self._settings.rows_per_batch):
            sums.add(self._objective.losses(group))
        return sums

    def _save_if_stopped(self, save: Callable[[], None]) -> None:
        try:
            check(self._stop)
        except StoppedError:
            save()
            raise

    def _batches(self, epoch: int) -> list[list[int]]:
        settings = self._settings
        return epoch_batches(self._training, self._samples, settings.rows_per_batch, settings.seed, epoch)

    def _progress(self, num_batches: int) -> float:
        settings, state = self._settings, self.state
        of_epochs = (state.epoch + state.next_batch / num_batches) / settings.num_epochs
        if settings.budget_s is None:
            return of_epochs
        # Relative to the time that was left at the first step, so that the learning rate starts at its maximum.
        left = max(1e-9, settings.budget_s - state.started_s)
        return max(of_epochs, (state.elapsed_s - state.started_s) / left)

    def _report_progress(
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
        report = Progress(
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
        state.log.append(asdict(report) | {"agreement": list(report.agreement), "elapsed_s": state.elapsed_s})
        self._report(report)


class _Speed:
    """The recent speed in rows per second."""

    def __init__(self) -> None:
        self.rows_per_s = 0.0
        self._last = time.perf_counter()

    def add(self, num_rows: int) -> None:
        now = time.perf_counter()
        speed = num_rows / max(1e-9, now - self._last)
        self.rows_per_s = speed if not self.rows_per_s else _SPEED_DECAY * self.rows_per_s + (1 - _SPEED_DECAY) * speed
        self._last = now


def _cast(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts the parameters only: buffers of transformers' models must stay in float32."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


def _up_to_rows(indices: Sequence[int], samples: Sequence[Sample], num_rows: int) -> list[int]:
    chosen: list[int] = []
    for index in indices:
        if num_rows <= 0:
            break
        num_rows -= num_rows_of(samples[index])
        chosen.append(index)
    return chosen
