"""A draft model: what it is made from, that it learns, and that it is a draft for real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from baton.core.errors import ConfigError
from baton.engine.draft.model.draft_model import DraftModel, load_draft_model
from baton.engine.draft.model.token_state import TokenState
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.models.tokenizer import Tokenizer
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.step_cost_model import StepCostModel
from baton.train.dataset import Sample
from baton.train.draft_init import draft_config, initial_draft
from baton.train.draft_model import evaluate
from baton.train.run import HeldOut, TrainingData, TrainingResult
from baton.train.settings import DraftModelSettings
from baton.train.states import LiveStates
from baton.train.target import FrozenTarget
from benchmarks.device_run.attention_world import poison
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.draft_model import DraftModelProposer
from tests.drafting import Recording, engine_over, requests_for, run
from tests.tiny_drafts import tiny_draft_lm
from tests.unit.baton.train.conftest import sharp_target

Train = Callable[..., TrainingResult]
MakeSettings = Callable[..., DraftModelSettings]
NUM_DRAFTS = 4


def test_draft_layers_are_spread_evenly_over_a_llama(target: LoadedModel) -> None:
    draft, layers = initial_draft(DraftModelSettings(num_layers=3), target)
    assert layers == (0, 4, 7)
    model: Any = target.model
    for layer, index in zip(draft.model.layers, layers, strict=True):
        ours, theirs = layer.state_dict(), model.model.layers[index].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(draft.lm_head.weight, model.lm_head.weight)
    trained = {name.split(".")[-2] for name, weight in draft.named_parameters() if weight.requires_grad}
    assert not trained & {"embed_tokens", "lm_head"}


def test_a_different_width_starts_from_random_weights(target: LoadedModel) -> None:
    settings = DraftModelSettings(num_layers=9, hidden_size=16)
    draft, layers = initial_draft(settings, target)
    assert layers == ()
    assert all(weight.requires_grad for weight in draft.parameters())
    config = draft.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (1, 1, 24)
    assert config.tie_word_embeddings
    again, _ = initial_draft(settings, target)
    other, _ = initial_draft(DraftModelSettings(num_layers=9, hidden_size=16, seed=1), target)
    ours, same, others = (model.model.layers[0].mlp.up_proj.weight for model in (draft, again, other))
    assert torch.equal(ours, same)
    assert not torch.equal(ours, others)


def test_a_narrower_draft_starts_with_the_main_components_of_the_embedding(target: LoadedModel) -> None:
    draft, _ = initial_draft(DraftModelSettings(num_layers=1, hidden_size=16), target)
    own, theirs = draft.get_input_embeddings().weight, target.model.get_input_embeddings().weight.float()
    left, values, _ = torch.linalg.svd(theirs, full_matrices=False)
    best = left[:, :16] * values[:16]
    assert torch.allclose(own @ own.T, best @ best.T, atol=1e-4)


def test_a_target_that_is_not_a_llama_provides_its_embedding() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64))
    draft, layers = initial_draft(DraftModelSettings(num_layers=2), prepare_model(model.eval(), "float32"))
    assert layers == ()
    assert torch.equal(draft.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert draft.lm_head.weight is draft.get_input_embeddings().weight  # as in the target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 8}, "num_layers is 8, but the target itself has 8"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3, which does not divide 4"),
    ],
)
def test_impossible_draft_sizes_are_refused(target: LoadedModel, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draft_config(DraftModelSettings(**changes), target)


def test_training_beats_the_initial_draft(train: Train, draft_settings: MakeSettings) -> None:
    untrained = train(draft_settings(learning_rate=1e-12, num_epochs=1), "untrained").evaluation.greedy
    trained = train(draft_settings(num_epochs=5, learning_rate=1e-2), "trained").evaluation.greedy
    assert trained.reached == untrained.reached
    assert trained.mean_accepted_length > untrained.mean_accepted_length + 1.0
    assert trained.unconditional[0] > 0.4


def test_a_killed_run_resumes_to_the_same_draft(
    resumed_as_whole: Callable[[DraftModelSettings, int], Sequence[int]], draft_settings: MakeSettings
) -> None:
    assert resumed_as_whole(draft_settings(num_epochs=2, save_every_s=1e-9, report_every_steps=1), 7)[0] == 7


def test_acceptance_matches_drafting_one_position_at_a_time(target: LoadedModel, samples: list[Sample]) -> None:
    chosen = [*samples[:4], Sample(samples[4].token_ids[:9], 5)]
    model = tiny_draft_lm()
    draft = DraftModel(prepare_model(model, "float32"), 96)
    data = TrainingData(chosen, [], range(len(chosen)), LiveStates(FrozenTarget(target.model, ()), chosen))
    found = evaluate(draft, HeldOut(data, [[0, 1, 2], [3, 4]]), NUM_DRAFTS)
    reached, accepted = [0] * NUM_DRAFTS, [0] * NUM_DRAFTS
    for sample in chosen:
        for known in range(sample.num_prompt_tokens + 1, len(sample.token_ids)):
            tokens = list(sample.token_ids[:known])
            for _ in range(NUM_DRAFTS):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            said = list(sample.token_ids[known : known + NUM_DRAFTS])
            for length in range(1, len(said) + 1):
                reached[length - 1] += 1
                accepted[length - 1] += tokens[known : known + length] == said[:length]
    assert found.greedy.reached == reached
    assert found.greedy.accepted == accepted


def test_the_checkpoint_drafts_and_changes_no_token(
    train: Train, draft_settings: MakeSettings, tokenizer: Tokenizer, samples: list[Sample]
) -> None:
    folder: Path = train(draft_settings(num_epochs=5, learning_rate=1e-2)).folder
    loaded = prepare_model(sharp_target(), "float32")
    draft = load_draft_model(str(folder), loaded, tokenizer, torch.device("cpu"), "float32")
    assert len(draft.layer_specs) == 2
    runner = ModelRunner(loaded, 96, 4, draft=draft)
    poison(runner.cache)
    texts = [list(sample.token_ids[:9]) for sample in samples[:4]]
    plain = run(engine_over(runner), requests_for(texts, prefix="plain"))
    state = TokenState(draft, runner, ships_prompts=False)
    recording = Recording(DraftModelProposer(state, DraftPasses(StepCostModel()), draws=False, catch_up_rows=256))
    assert run(engine_over(runner, recording), requests_for(texts)) == plain
    assert sum(recording.accepted) > 10
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| layers | 2, 32 wide; initialized with layers 0, 7 of the target |" in card
