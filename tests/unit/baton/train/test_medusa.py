"""Medusa heads: where they begin, that they learn, what is written, and that they draft for real."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from baton.core.errors import ConfigError
from baton.engine.draft.medusa.heads import MedusaHeads, load_medusa
from baton.engine.draft.medusa.medusa_state import MedusaState
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.step_cost_model import StepCostModel
from baton.train.batches import make_rows
from baton.train.dataset import Sample
from baton.train.medusa import evaluate, initial_heads
from baton.train.run import TrainingResult
from baton.train.settings import MedusaSettings
from baton.train.target import FrozenTarget
from benchmarks.device_run.attention_world import poison
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.medusa import MedusaProposer
from tests.drafting import Recording, engine_over, requests_for, run
from tests.unit.baton.train.conftest import answers_of, sharp_target

Train = Callable[..., TrainingResult]
MakeSettings = Callable[..., MedusaSettings]
NUM_HEADS = 3


def forgetful_target() -> LlamaForCausalLM:
    """Each token depends on the one before it alone, so that one hidden state says all that follows."""
    model = sharp_target()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return model


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    loaded = prepare_model(forgetful_target(), "float32")
    loaded.model.set_attn_implementation("sdpa")
    return loaded


@pytest.fixture(scope="module")
def samples(target: LoadedModel) -> list[Sample]:
    return answers_of(target.model, 240)


@pytest.fixture
def heads(target: LoadedModel, medusa_settings: MakeSettings) -> MedusaHeads:
    """New ones, then shaken so that each says something else."""
    made = initial_heads(medusa_settings(), target, torch.arange(1, 65))
    generator = torch.Generator().manual_seed(4)
    for block in made.blocks:
        for parameter in block.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator))
    return made.requires_grad_(False)


def states_of(target: LoadedModel, samples: list[Sample]) -> list[Any]:
    return FrozenTarget(target.model, ()).states_of(samples)


def test_new_heads_predict_the_same_as_the_lm_head_of_the_target(
    target: LoadedModel, medusa_settings: MakeSettings
) -> None:
    vocabulary = torch.arange(3, 67)
    heads = initial_heads(medusa_settings(num_blocks=2), target, vocabulary)
    hidden = torch.randn(5, heads.hidden_size)
    expected = hidden @ target.model.get_output_embeddings().weight[vocabulary].T
    for logits in heads(hidden):
        torch.testing.assert_close(logits, expected)
    assert torch.equal(heads.to_target_ids(torch.tensor([0, 63])), torch.tensor([3, 66]))


@pytest.mark.parametrize(("train_lm_head", "least_gain"), [(True, 1.0), (False, 0.1)])
def test_training_beats_the_initial_heads(
    train: Train, medusa_settings: MakeSettings, train_lm_head: bool, least_gain: float
) -> None:
    untrained = train(medusa_settings(learning_rate=1e-12, num_epochs=1), "untrained")
    trained = train(medusa_settings(num_epochs=10, learning_rate=2e-2, train_lm_head=train_lm_head), "trained")
    before, after = untrained.evaluation, trained.evaluation
    assert after.greedy.reached == before.greedy.reached
    assert after.greedy.mean_accepted_length > before.greedy.mean_accepted_length + least_gain
    assert after.greedy.unconditional[0] > 0.6 * least_gain
    assert after.greedy_tree is not None
    assert after.greedy_tree.mean_accepted_length > after.greedy.mean_accepted_length
    first, last = (load_file(run.folder / "model.safetensors")["lm_head.weight"] for run in (untrained, trained))
    assert torch.equal(first, last) != train_lm_head


def test_a_killed_run_resumes_to_the_same_heads(
    resumed_as_whole: Callable[[MedusaSettings, int], Sequence[int]], medusa_settings: MakeSettings
) -> None:
    assert resumed_as_whole(medusa_settings(num_epochs=2, save_every_s=1e-9, report_every_steps=1), 7)[0] == 7


def test_acceptance_matches_guessing_at_one_position_at_a_time(
    target: LoadedModel, samples: list[Sample], heads: MedusaHeads
) -> None:
    chosen = samples[:10]
    found = evaluate(heads, [make_rows(chosen, states_of(target, chosen))], num_tree_tokens=3)
    reached, accepted = [0] * NUM_HEADS, [0] * NUM_HEADS
    for sample in chosen:
        hidden = target.model.model(torch.tensor([sample.token_ids])).last_hidden_state[0]
        # The token behind ``place`` is known to the one who drafts; guesses are about those behind it.
        for place in range(sample.num_prompt_tokens - 1, len(sample.token_ids) - 2):
            guesses = heads.to_target_ids(heads(hidden[place]).argmax(dim=-1)).tolist()
            said = list(sample.token_ids[place + 2 : place + 2 + NUM_HEADS])
            for length in range(1, len(said) + 1):
                reached[length - 1] += 1
                accepted[length - 1] += guesses[:length] == said[:length]
    assert found.greedy.reached == reached
    assert found.greedy.accepted == accepted
    assert found.sampled.reached == []
    assert found.sampled_tree is None


def test_heads_are_saved_in_the_format_of_vllm(
    train: Train, medusa_settings: MakeSettings, target: LoadedModel
) -> None:
    result = train(medusa_settings(num_epochs=1, num_blocks=2))
    config = json.loads((result.folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "medusa"
    assert config["original_lm_head"] is True
    sizes = {name: config[name] for name in ("num_heads", "num_hidden_layers", "truncated_vocab_size", "vocab_size")}
    assert sizes == {"num_heads": 3, "num_hidden_layers": 2, "truncated_vocab_size": 64, "vocab_size": 96}
    stored = load_file(result.folder / "model.safetensors")
    assert set(stored) == {"token_map", "lm_head.weight"} | {
        f"blocks.{head}.layers.{block}.{part}" for head in range(3) for block in range(2) for part in ("weight", "bias")
    }
    assert 95 in stored["token_map"].tolist()  # the token that ends a turn, which the answers never have
    card = (result.folder / "README.md").read_text(encoding="utf-8")
    assert "| heads | 3, each of 2 residual blocks |" in card
    assert "As a tree of " in card


def test_a_full_vocabulary_needs_no_map(train: Train, medusa_settings: MakeSettings, target: LoadedModel) -> None:
    result = train(medusa_settings(num_epochs=1, draft_vocab_size=1000))
    heads = load_medusa(result.folder, target.model, torch.float32, torch.device("cpu"))
    assert not heads.settings.maps_vocabulary
    assert heads.draft_vocab_size == target.vocab_size


def test_the_checkpoint_drafts_and_changes_no_token(
    train: Train, medusa_settings: MakeSettings, samples: list[Sample]
) -> None:
    folder: Path = train(medusa_settings(num_epochs=10, learning_rate=2e-2)).folder
    model = forgetful_target()
    heads = load_medusa(folder, model, torch.float32, torch.device("cpu"))
    runner = ModelRunner(prepare_model(model, "float32"), 96, 4, draft=heads)
    poison(runner.cache)
    texts = [list(sample.token_ids[:9]) for sample in samples[:4]]
    plain = run(engine_over(runner), requests_for(texts, prefix="plain"))
    recording = Recording(MedusaProposer(MedusaState(heads, runner), DraftPasses(StepCostModel())))
    assert run(engine_over(runner, recording), requests_for(texts)) == plain
    assert sum(recording.accepted) > 10


@pytest.mark.parametrize(("name", "value"), [("num_heads", 0), ("num_blocks", 0), ("step_decay", 0.0)])
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"training: {name} is {value!r}, expected"):
        MedusaSettings(**{name: value})  # type: ignore[arg-type]
