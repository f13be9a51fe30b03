"""A training run from answers to checkpoint, for every kind of draft."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from torch import nn

from baton.core.errors import ConfigError
from baton.core.files import writing
from baton.engine.models.model_loader import LoadedModel
from baton.train.batches import RowBatch, group_by_rows, make_rows, split_samples
from baton.train.card import LOG_NAME, CardFacts, Description, TrainingFacts, write_card, write_log
from baton.train.dataset import AnswerDataset, Sample
from baton.train.evaluate import Evaluation
from baton.train.objective import Objective, compute_dtype
from baton.train.settings import FREE_SETTINGS, TrainingSettings
from baton.train.states import CachedStates, JoinedStates, LiveStates, States
from baton.train.stopping import Stop, check, never
from baton.train.target import FrozenTarget, SampleStates
from baton.train.trainer import Progress, Trainer
from baton.train.training_state import load_state, save_state

_STATE_NAME = "training_state.pt"
_STATES_FOLDER = "states"

Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Answers of a target, and the target's states over them.

    Attributes:
        training: indices of the training samples.
        held_out: indices of the samples that are only evaluated.
        states: the states of all samples.
    """

    samples: Sequence[Sample]
    training: Sequence[int]
    held_out: Sequence[int]
    states: States

    def rows(self, indices: Sequence[int]) -> RowBatch:
        """The rows of some samples."""
        return make_rows([self.samples[index] for index in indices], self.states.load(indices))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Samples for the evaluation, in groups with about as many answer tokens as a training step."""

    data: TrainingData
    groups: Sequence[Sequence[int]]
    report: Report = lambda progress: None
    stop: Stop = never

    def __iter__(self) -> Iterator[tuple[list[Sample], list[SampleStates]]]:
        """Yields the groups. May raise :class:`baton.train.stopping.StoppedError` between two groups."""
        for number, group in enumerate(self.groups):
            check(self.stop)
            self.report(Progress("evaluation", progress=number / len(self.groups)))
            yield [self.data.samples[index] for index in group], self.data.states.load(group)

    def batches(self) -> Iterator[RowBatch]:
        """Yields the rows of each group."""
        for samples, states in self:
            yield make_rows(samples, states)


class Method(Protocol):
    """One kind of draft.

    Attributes:
        feature_layers: the target's hidden states that the draft reads, besides the last one.
    """

    @property
    def settings(self) -> TrainingSettings: ...

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    def objective(self, data: TrainingData) -> Objective:
        """Creates a new draft, in float32 on the target's device.

        Raises:
            ConfigError, UnsupportedModelError: such a draft is impossible for this target or these answers.
        """
        ...

    def write(self, network: nn.Module, folder: Path, target_name: str) -> None:
        """Writes a checkpoint of the trained network of :meth:`objective`."""
        ...

    def evaluate(self, folder: Path, held_out: HeldOut) -> Evaluation:
        """Evaluates the checkpoint as it was written, not the network in memory."""
        ...

    def describe(self, network: nn.Module) -> Description:
        """The card's description of this kind of draft, and of this draft."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training run.

    Attributes:
        folder: folder with the checkpoint, its card and its log.
        num_steps: number of optimizer steps.
        elapsed_s: duration of all parts of an interrupted run together.
        evaluation: evaluation of the written checkpoint.
    """

    folder: Path
    num_steps: int
    elapsed_s: float
    evaluation: Evaluation


def train(
    method: Method,
    target: LoadedModel,
    datasets: Sequence[AnswerDataset],
    output: Path,
    work: Path,
    facts: CardFacts,
    report: Report = lambda progress: None,
    *,
    stop: Stop = never,
    cache_states: bool = True,
) -> TrainingResult:
    """Trains, evaluates on held-out answers, and writes a checkpoint with its card and its log.

    After an interruption, a call with the same arguments continues from the last state in ``work``.

    Args:
        target: the model that gave all the answers. Its attention is switched to the ordinary implementation.
        output: folder of the checkpoint; files of an earlier checkpoint are replaced.
        work: folder of files that are not needed after the end.
        facts: facts for the card that are not measured.
        report: called regularly with the progress.
        stop: checked regularly.
        cache_states: keep the target's hidden states on disk (``2 * hidden_size`` bytes per token in bfloat16 for each
            layer that the draft reads and for the last one), so that the target runs once rather than every epoch.

    Raises:
        ConfigError: the datasets are empty, a dataset is of another target, or ``work`` belongs to another run.
        UnsupportedModelError: such a draft is impossible for this target.
        StoppedError: ``stop`` returned True; the state is in ``work``.
        StorageError: a file cannot be written; the state is in ``work``.
    """
    start = time.perf_counter()
    settings = method.settings
    _check_datasets(datasets, target)
    answers = [list(dataset) for dataset in datasets]
    samples = [sample for group in answers for sample in group]
    training, held_out = split_samples(samples, settings.held_out_share, settings.seed)
    if not training or not held_out:
        raise ConfigError(
            f"training: {_names(datasets)}: {len(samples)} samples, of which {len(training) + len(held_out)} are long "
            "enough. Expected at least 2. Collect more answers."
        )
    frozen = FrozenTarget(target.model, method.feature_layers)
    path, identity = work / _STATE_NAME, _identity(settings, target, samples)
    stored = load_state(path, identity)
    states: States = LiveStates(frozen, samples)
    if cache_states:
        states = _cached_states(frozen, target, answers, work, report, stop)
    data = TrainingData(samples, training, held_out, states)
    objective, dtype = method.objective(data), compute_dtype(settings, target.model)
    trainer = Trainer(objective, dtype, samples, training, held_out, settings, report, stop)
    if stored is not None:
        trainer.resume(*stored)
    trainer.run(start, lambda: save_state(path, identity, trainer.state, trainer.optimizer.state_dict()))

    network = trainer.trained_network()
    description = method.describe(network)
    with _writing(output):
        output.mkdir(parents=True, exist_ok=True)
        # Written first, because the same command recognises its folder by the log if the evaluation is interrupted.
        write_log(output / LOG_NAME, settings, description, trainer.state.log, None)
        method.write(network, output, facts.target_name)
    groups = group_by_rows(held_out[: settings.num_evaluated_samples], samples, settings.rows_per_batch)
    evaluation = method.evaluate(output, HeldOut(data, groups, report, stop))
    numbers = TrainingFacts(
        settings=settings,
        target_fingerprint=target.fingerprint,
        num_samples=len(training),
        num_answer_tokens=sum(samples[index].num_answer_tokens for index in training),
        num_held_out=len(held_out),
        num_steps=trainer.state.num_steps,
        num_rows=trainer.state.num_rows,
        elapsed_s=trainer.state.elapsed_s,
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
    )
    with _writing(output):
        write_log(output / LOG_NAME, settings, description, trainer.state.log, evaluation)
        write_card(output, facts, description, numbers, evaluation)
    return TrainingResult(output, trainer.state.num_steps, trainer.state.elapsed_s, evaluation)


def _writing(output: Path) -> AbstractContextManager[None]:
    resume = "Free some space there, and repeat the command: it goes on from here."
    return writing(output, also=(SafetensorError,), if_full=resume)


def _check_datasets(datasets: Sequence[AnswerDataset], target: LoadedModel) -> None:
    if not any(len(dataset) for dataset in datasets):
        raise ConfigError(f"training: {_names(datasets)}: there are no answers. Collect answers of the target first.")
    for dataset in datasets:
        if (found := dataset.settings.get("target")) != target.fingerprint:
            raise ConfigError(
                f"training: the answers in {dataset.folder} come from another model (fingerprint {found}) than the "
                f"target ({target.fingerprint}). Train on answers of the target itself."
            )


def _names(datasets: Sequence[AnswerDataset]) -> str:
    return ", ".join(str(dataset.folder) for dataset in datasets) or "no dataset"


def _cached_states(
    frozen: FrozenTarget,
    target: LoadedModel,
    answers: Sequence[Sequence[Sample]],
    work: Path,
    report: Report,
    stop: Stop,
) -> States:
    """The cached states, with one cache per dataset, so that growing datasets keep their caches."""
    parts = [
        CachedStates(work / f"{_STATES_FOLDER}-{index}", frozen, target.fingerprint, samples)
        for index, samples in enumerate(answers)
    ]
    total, done, start = sum(part.num_missing_tokens() for part in parts), 0, time.perf_counter()

    def tell(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        speed = done / max(time.perf_counter() - start, 1e-9)
        report(Progress("states", progress=done / total, tokens_per_s=speed, eta_s=(total - done) / speed))
        check(stop)

    for part in parts:
        part.fill(tell)
    return JoinedStates(parts, [len(samples) for samples in answers])


def _identity(settings: TrainingSettings, target: LoadedModel, samples: Sequence[Sample]) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(f"{sample.num_prompt_tokens}:{sample.token_ids}".encode())
    choices = {name: value for name, value in asdict(settings).items() if name not in FREE_SETTINGS}
    identity: dict[str, Any] = json.loads(json.dumps(choices))
    return identity | {"target": target.fingerprint, "dataset": digest.hexdigest()}
