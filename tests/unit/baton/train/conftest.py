"""A tiny target and its answers for all tests of training; trainers, and runs that are killed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedModel

from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.models.tokenizer import Tokenizer
from baton.train.card import CardFacts
from baton.train.dataset import AnswerDataset, Sample
from baton.train.draft_model import DraftModelMethod
from baton.train.eagle3 import Eagle3Method
from baton.train.medusa import MedusaMethod
from baton.train.run import Method, TrainingResult
from baton.train.run import train as train_method
from baton.train.settings import DraftModelSettings, Eagle3Settings, MedusaSettings, TrainingSettings
from baton.train.trainer import Progress
from tests.tiny_drafts import VOCAB, tiny_target
from tests.tiny_tokenizers import byte_level_tokenizer

PROMPT_TOKENS = 5
ANSWER_TOKENS = 20
FEW_SAMPLES = 80
"""Enough for tests that do not depend on how much is learned: five or six steps in an epoch."""
# Settings of all kinds of drafts with which runs take about a second.
_QUICK: dict[str, Any] = {
    "num_epochs": 8,
    "rows_per_batch": 256,
    "learning_rate": 3e-3,
    "warmup_steps": 5,
    "held_out_share": 0.15,
}


class KilledError(Exception):
    """Simulates that a run is killed."""


def sharp_target(vocab: int = VOCAB) -> LlamaForCausalLM:
    """A target with sharper distributions than random weights give, so that there is something to learn."""
    model = tiny_target(vocab=vocab)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(3.0)
    model.generation_config.eos_token_id = VOCAB - 1
    return model


@pytest.fixture(scope="session")
def target() -> LoadedModel:
    model = sharp_target()
    loaded = prepare_model(model, "float32")
    model.set_attn_implementation("sdpa")
    return loaded


@torch.no_grad()
def answers_of(model: PreTrainedModel, count: int, seed: int = 0) -> list[Sample]:
    """Samples with greedy answers to random prompts."""
    token_ids = torch.randint(0, VOCAB, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))
    for _ in range(ANSWER_TOKENS):
        best = model(token_ids).logits[:, -1].argmax(dim=-1)
        token_ids = torch.cat((token_ids, best[:, None]), dim=1)
    return [Sample(tuple(row), PROMPT_TOKENS) for row in token_ids.tolist()]


@pytest.fixture(scope="session")
def samples(target: LoadedModel) -> list[Sample]:
    return answers_of(target.model, 240)


@pytest.fixture
def make_dataset(tmp_path: Path, target: LoadedModel, samples: list[Sample]) -> Callable[..., AnswerDataset]:
    numbers = itertools.count()

    def make(count: int | None = None, fingerprint: str = target.fingerprint) -> AnswerDataset:
        folder = tmp_path / f"answers-{next(numbers)}"
        dataset = AnswerDataset(folder, {"target": fingerprint})
        dataset.append(samples[:count])
        return dataset

    return make


@pytest.fixture
def settings() -> Callable[..., Eagle3Settings]:
    def make(**changes: Any) -> Eagle3Settings:
        return Eagle3Settings(**{**_QUICK, "draft_vocab_size": 64, "num_ttt_steps": 3, **changes})

    return make


@pytest.fixture
def medusa_settings() -> Callable[..., MedusaSettings]:
    def make(**changes: Any) -> MedusaSettings:
        return MedusaSettings(**{**_QUICK, "draft_vocab_size": 64, "num_heads": 3, **changes})

    return make


@pytest.fixture
def draft_settings() -> Callable[..., DraftModelSettings]:
    def make(**changes: Any) -> DraftModelSettings:
        return DraftModelSettings(**{**_QUICK, "num_layers": 2, **changes})

    return make


@pytest.fixture
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture
def train(
    tmp_path: Path,
    target: LoadedModel,
    make_dataset: Callable[..., AnswerDataset],
    facts: CardFacts,
    tokenizer: Tokenizer,
) -> Callable[..., TrainingResult]:
    """A function that trains the kind of draft to which the settings belong."""

    def method_of(settings: TrainingSettings) -> Method:
        if isinstance(settings, MedusaSettings):
            return MedusaMethod(settings, target)
        if isinstance(settings, DraftModelSettings):
            return DraftModelMethod(settings, target, tokenizer)
        assert isinstance(settings, Eagle3Settings)
        return Eagle3Method(settings, target)

    def run(
        settings: TrainingSettings,
        name: str = "a",
        dataset: AnswerDataset | None = None,
        num_samples: int | None = None,
        **kwargs: Any,
    ):
        answers = make_dataset(num_samples) if dataset is None else dataset
        output, work = tmp_path / name, tmp_path / f"{name}-work"
        return train_method(method_of(settings), target, [answers], output, work, facts, **kwargs)

    return run


@pytest.fixture
def resumed_as_whole(train: Callable[..., TrainingResult]) -> Callable[[TrainingSettings, int], Sequence[int]]:
    """A function that compares a killed and resumed run with an uninterrupted one."""

    def compare(always_saved: TrainingSettings, last_step: int) -> Sequence[int]:
        """Takes settings that save and report at every step; returns the steps that the resumed part reported."""

        def kill(told: Progress) -> None:
            if told.num_steps == last_step:
                raise KilledError

        whole = train(always_saved, "whole", num_samples=FEW_SAMPLES)
        with pytest.raises(KilledError):
            train(always_saved, "killed", num_samples=FEW_SAMPLES, report=kill)
        steps: list[int] = []
        resumed = train(
            always_saved,
            "killed",
            num_samples=FEW_SAMPLES,
            report=lambda told: steps.append(told.num_steps) if told.stage == "training" else None,
        )
        assert resumed.num_steps == whole.num_steps > last_step
        ours, theirs = (load_file(run.folder / "model.safetensors") for run in (resumed, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert resumed.evaluation == whole.evaluation
        return steps

    return compare


@pytest.fixture
def facts() -> CardFacts:
    return CardFacts("owner/tiny", "apache-2.0", "Answers to random tokens.", "baton train eagle3 --target owner/tiny")
