"""Trains an EAGLE-3.1 head for a target, from answers of that target."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.draft.eagle import EagleHead
from engine.draft.eagle_checkpoint import load_eagle, save_eagle3
from engine.errors import ConfigError
from engine.model_loader import LoadedModel
from training.batches import group_by_rows, make_rows, split_samples
from training.card import LOG_NAME, CardFacts, TrainingFacts, write_card, write_log
from training.dataset import AnswerDataset, Sample
from training.evaluate import Evaluation, evaluate
from training.head_init import head_settings, initial_head
from training.settings import Eagle3Settings
from training.states import CachedStates, JoinedStates, LiveStates, States
from training.target import FrozenTarget
from training.trainer import Eagle3Trainer, Progress
from training.training_state import load_state, save_state
from training.vocabulary import choose_vocabulary, count_answer_tokens, coverage

_STATE_NAME = "training_state.pt"
_STATES_FOLDER = "states"
_SAMPLES_TO_FIT = 256
# A resumed run may have others.
_FREE_SETTINGS = frozenset({"budget_s", "report_every_steps", "save_every_s", "num_evaluated_samples"})


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """
    Attributes:
        folder: of the checkpoint, its card and its log.
        num_steps: optimizer steps.
        elapsed_s: over all parts of an interrupted run.
        evaluation: of the checkpoint as it was written.
    """

    folder: Path
    num_steps: int
    elapsed_s: float
    evaluation: Evaluation


def train_eagle3(
    settings: Eagle3Settings,
    target: LoadedModel,
    datasets: Sequence[AnswerDataset],
    output: Path,
    work: Path,
    facts: CardFacts,
    report: Callable[[Progress], None] = lambda progress: None,
    *,
    cache_states: bool = True,
) -> TrainingResult:
    """Trains, evaluates on answers that were held out, and writes a checkpoint that servers of EAGLE-3 heads load.

    Interrupted, it goes on from the last state in ``work`` when it is called again with the same arguments.

    Args:
        target: must be the model that gave all the answers. Its attention is switched to the ordinary one.
        output: folder of the checkpoint; files of an earlier one are replaced.
        work: folder of what is needed until the end and not afterwards.
        facts: what the card says beyond what is measured.
        report: called now and then.
        cache_states: keep the target's hidden states on disk (``2 * 4 * hidden_size`` bytes per token in bfloat16), so
            that it runs once instead of once an epoch.

    Raises:
        ConfigError: the datasets are empty, or one is of another target; or ``work`` belongs to another run.
        UnsupportedModelError: there can be no such head for this target.
    """
    start = time.perf_counter()
    _check_datasets(datasets, target)
    answers = [list(dataset) for dataset in datasets]
    samples = [sample for group in answers for sample in group]
    training, held_out = split_samples(samples, settings.held_out_share, settings.seed)
    if not training or not held_out:
        raise ConfigError(
            f"training: {_names(datasets)}: {len(samples)} samples, of which {len(training) + len(held_out)} are long "
            "enough. Expected at least 2. Collect more answers."
        )
    counts = count_answer_tokens(samples[index] for index in training)
    vocabulary = choose_vocabulary(counts, settings.draft_vocab_size, target.vocab_size, target.eos_token_ids)
    shape = head_settings(target.model, settings, len(vocabulary))
    frozen = FrozenTarget(target.model, shape.feature_layers)
    states: States = LiveStates(frozen, samples)
    if cache_states:
        states = _cached_states(frozen, target, answers, work, report)
    fit_on = training[:_SAMPLES_TO_FIT]
    head = initial_head(
        shape, target.model, vocabulary, [samples[index] for index in fit_on], states.load(fit_on), settings.seed
    ).to(target.model.device)
    trainer = Eagle3Trainer(head, target.model, vocabulary, samples, training, held_out, states, settings, report)

    path = work / _STATE_NAME
    identity = _identity(settings, target, samples)
    if (stored := load_state(path, identity)) is not None:
        trainer.resume(*stored)
    trainer.run(start, lambda: save_state(path, identity, trainer.state, trainer.optimizer.state_dict()))

    evaluation = _write_checkpoint(trainer, target, samples, held_out, states, settings, output, facts)
    numbers = _training_facts(settings, trainer, samples, training, held_out, counts, vocabulary, target)
    write_log(output / LOG_NAME, settings, trainer.state.log, evaluation)
    write_card(output, facts, numbers, evaluation)
    return TrainingResult(output, trainer.state.num_steps, trainer.state.elapsed_s, evaluation)


def _check_datasets(datasets: Sequence[AnswerDataset], target: LoadedModel) -> None:
    if not any(len(dataset) for dataset in datasets):
        raise ConfigError(f"training: {_names(datasets)}: no answers. Collect some with the target first.")
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
    report: Callable[[Progress], None],
) -> States:
    """A cache per dataset, so that datasets that grow keep what is there."""
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

    for part in parts:
        part.fill(tell)
    return JoinedStates(parts, [len(samples) for samples in answers])


def _identity(settings: Eagle3Settings, target: LoadedModel, samples: Sequence[Sample]) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(f"{sample.num_prompt_tokens}:{sample.token_ids}".encode())
    choices = {name: value for name, value in asdict(settings).items() if name not in _FREE_SETTINGS}
    identity: dict[str, Any] = json.loads(json.dumps(choices))
    return identity | {"target": target.fingerprint, "dataset": digest.hexdigest()}


def _write_checkpoint(
    trainer: Eagle3Trainer,
    target: LoadedModel,
    samples: Sequence[Sample],
    held_out: Sequence[int],
    states: States,
    settings: Eagle3Settings,
    output: Path,
    facts: CardFacts,
) -> Evaluation:
    """Evaluates what was written, not what is in memory."""
    head = trainer.trained_head()
    compute_dtype = trainer.dtype
    save_eagle3(head.to(torch.bfloat16), output, facts.target_name)
    written: EagleHead = load_eagle(output, target.model, compute_dtype, target.model.device)
    chosen = held_out[: settings.num_evaluated_samples]
    groups = group_by_rows(chosen, samples, settings.rows_per_batch)
    batches = (make_rows([samples[index] for index in group], states.load(group)) for group in groups)
    return evaluate(written, batches, settings.num_draft_tokens)


def _training_facts(
    settings: Eagle3Settings,
    trainer: Eagle3Trainer,
    samples: Sequence[Sample],
    training: Sequence[int],
    held_out: Sequence[int],
    counts: Counter[int],
    vocabulary: torch.Tensor,
    target: LoadedModel,
) -> TrainingFacts:
    return TrainingFacts(
        settings=settings,
        target_fingerprint=target.fingerprint,
        num_samples=len(training),
        num_answer_tokens=sum(samples[index].num_answer_tokens for index in training),
        num_held_out=len(held_out),
        num_steps=trainer.state.num_steps,
        num_rows=trainer.state.num_rows,
        elapsed_s=trainer.state.elapsed_s,
        vocabulary_coverage=coverage(counts, vocabulary),
        num_parameters=sum(parameter.numel() for parameter in trainer.head.parameters()),
    )
