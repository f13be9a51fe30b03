"""A tiny target and what it says, for all tests of training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.model_loader import LoadedModel, prepare_model
from tests.tiny_drafts import VOCAB, tiny_target
from training.card import CardFacts
from training.dataset import AnswerDataset, Sample
from training.settings import Eagle3Settings

PROMPT_TOKENS = 5
ANSWER_TOKENS = 20


@pytest.fixture(scope="session")
def target() -> LoadedModel:
    """Sharper than random weights are, so that there is something to learn."""
    model = tiny_target()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(3.0)
    model.generation_config.eos_token_id = VOCAB - 1
    loaded = prepare_model(model, "float32")
    model.set_attn_implementation("sdpa")
    return loaded


@torch.no_grad()
def answers_of(model: PreTrainedModel, count: int, seed: int = 0) -> list[Sample]:
    """Greedy answers to random prompts."""
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
    def make(**changes: object) -> Eagle3Settings:
        defaults: dict[str, object] = {
            "draft_vocab_size": 64,
            "num_epochs": 8,
            "rows_per_batch": 256,
            "learning_rate": 3e-3,
            "warmup_steps": 5,
            "num_ttt_steps": 3,
            "held_out_share": 0.15,
        }
        return Eagle3Settings(**{**defaults, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def facts() -> CardFacts:
    return CardFacts("owner/tiny", "apache-2.0", "Answers to random tokens.", "baton train eagle3 --target owner/tiny")
