"""A whole training run learns, resumes, writes loadable checkpoints and refuses invalid settings."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from baton.core.errors import ConfigError
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.references import default_draft
from baton.engine.models.default_model import DEFAULT_MODEL_NAME
from baton.engine.models.model_loader import LoadedModel
from baton.train.dataset import AnswerDataset
from baton.train.run import TrainingResult
from baton.train.settings import Eagle3Settings
from baton.train.stopping import StoppedError
from baton.train.trainer import Progress
from tests.unit.baton.train.conftest import FEW_SAMPLES

MakeDataset = Callable[..., AnswerDataset]
MakeSettings = Callable[..., Eagle3Settings]


def test_training_beats_the_initial_head(train: Callable[..., TrainingResult], settings: MakeSettings) -> None:
    untrained = train(settings(learning_rate=1e-12, num_epochs=1), "untrained").evaluation.greedy
    reports: list[Progress] = []
    few_epochs = settings(num_epochs=5, learning_rate=5e-3)
    trained = train(few_epochs, "trained", report=reports.append).evaluation.greedy
    assert trained.reached == untrained.reached
    assert trained.mean_accepted_length > untrained.mean_accepted_length + 0.3
    assert trained.unconditional[0] > untrained.unconditional[0] + 0.02
    losses = [told.loss for told in reports if told.stage == "training"]
    assert losses[-1] < losses[0]
    agreement = next(told.agreement for told in reversed(reports) if told.stage == "held_out")
    assert len(agreement) == 3
    assert min(agreement) > 0.65  # and was 0.59 before


def test_same_seed_gives_the_same_head(train: Callable[..., TrainingResult], settings: MakeSettings) -> None:
    seeds = {"a": 0, "b": 0, "c": 1}
    runs = [train(settings(num_epochs=2, seed=seed), name, num_samples=FEW_SAMPLES) for name, seed in seeds.items()]
    first, second, other = ((run.folder / "model.safetensors").read_bytes() for run in runs)
    assert first == second
    assert first != other


@pytest.mark.parametrize("last_step", [7, pytest.param(10, marks=pytest.mark.thorough(covered_by="[7]"))])
def test_a_killed_run_resumes_to_the_same_head(
    resumed_as_whole: Callable[[Eagle3Settings, int], Sequence[int]], settings: MakeSettings, last_step: int
) -> None:
    steps = resumed_as_whole(settings(num_epochs=3, save_every_s=1e-9, report_every_steps=1), last_step)
    assert steps[0] == last_step  # what had been computed when it was killed had not been saved


def test_a_stopped_run_saves_its_last_step(train: Callable[..., TrainingResult], settings: MakeSettings) -> None:
    rare = settings(num_epochs=2, report_every_steps=1)
    steps: list[int] = []

    def record(told: Progress) -> None:
        if told.stage == "training":
            steps.append(told.num_steps)

    with pytest.raises(StoppedError):
        train(rare, num_samples=FEW_SAMPLES, report=record, stop=lambda: len(steps) >= 5)
    train(rare, num_samples=FEW_SAMPLES, report=record)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 5


def test_a_state_with_other_settings_is_refused(train: Callable[..., TrainingResult], settings: MakeSettings) -> None:
    short = settings(num_epochs=1)
    train(short, num_samples=FEW_SAMPLES)
    with pytest.raises(
        ConfigError, match=r"belongs to a run with other options: --learning-rate is \S+ and was \S+\. Give the same"
    ):
        train(replace(short, learning_rate=1e-4), num_samples=FEW_SAMPLES)


def test_a_budget_ends_the_run_with_the_learning_rate_at_zero(
    train: Callable[..., TrainingResult], settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=itertools.count(0.0, 0.01).__next__)  # moves whenever it is looked at
    for module in ("run", "trainer"):
        monkeypatch.setattr(f"baton.train.{module}.time", clock)
    reports: list[Progress] = []
    endless = settings(num_epochs=10_000, budget_s=1.0, report_every_steps=1)
    result = train(endless, num_samples=FEW_SAMPLES, report=reports.append)
    assert 1.0 <= result.elapsed_s < 1.1
    rates = [told.learning_rate for told in reports if told.stage == "training"]
    assert rates[-1] < 0.1 * max(rates)


def test_states_computed_live_train_the_same_head(train: Callable[..., TrainingResult], settings: MakeSettings) -> None:
    cached, live = (
        train(settings(num_epochs=2), name, num_samples=FEW_SAMPLES, cache_states=name == "a") for name in ("a", "b")
    )
    assert (cached.folder.parent / "a-work" / "states-0").is_dir()
    assert not (live.folder.parent / "b-work" / "states-0").exists()
    assert live.evaluation.greedy.mean_accepted_length == pytest.approx(
        cached.evaluation.greedy.mean_accepted_length, abs=0.1
    )


def test_the_checkpoint_loads_as_the_trained_head(
    train: Callable[..., TrainingResult], settings: MakeSettings, target: LoadedModel
) -> None:
    result = train(settings(num_epochs=1), num_samples=FEW_SAMPLES)
    head = load_eagle(result.folder, target.model, torch.float32, torch.device("cpu"))
    assert (head.settings.version, head.settings.fc_norm, head.settings.norm_output) == (3, True, True)
    assert head.feature_layers == (2, 4, 5)
    assert head.draft_vocab_size == 64
    stored = load_file(result.folder / "model.safetensors")
    assert stored["lm_head.weight"].dtype == torch.bfloat16
    assert stored["t2d"][95]  # the token that ends a turn, which the answers never have
    assert "embed_tokens.weight" not in stored


def test_the_model_card_and_the_log_describe_the_run(
    train: Callable[..., TrainingResult], settings: MakeSettings, target: LoadedModel
) -> None:
    result = train(settings(num_epochs=1, seed=3, evaluate_every_steps=5))
    card = (result.folder / "README.md").read_text(encoding="utf-8")
    greedy = result.evaluation.greedy
    for expected in (
        "license: apache-2.0",
        "base_model: owner/tiny",
        "Answers to random tokens.",
        "baton train eagle3 --target owner/tiny",
        target.fingerprint,
        f"mean accepted length {greedy.mean_accepted_length:.2f} at 5 draft tokens",
        " | ".join(f"{rate:.3f}" for rate in greedy.unconditional),
        " | ".join(f"{rate:.3f}" for rate in greedy.conditional),
        "| seed | 3 |",
        f"| steps | {result.num_steps:,} (",
        '"seed": 3',
    ):
        assert expected in card
    log = json.loads((result.folder / "training_log.json").read_text(encoding="utf-8"))
    assert log["acceptance"]["greedy"]["accepted"] == greedy.accepted
    assert [entry["num_steps"] for entry in log["log"] if entry["stage"] == "held_out"][:2] == [5, 10]


def test_training_without_answers_is_refused(
    train: Callable[..., TrainingResult], settings: MakeSettings, make_dataset: MakeDataset
) -> None:
    with pytest.raises(ConfigError, match=r"there are no answers\. Collect answers of the target first"):
        train(settings(), dataset=make_dataset(0))


def test_training_with_too_few_answers_is_refused(
    train: Callable[..., TrainingResult], settings: MakeSettings, make_dataset: MakeDataset
) -> None:
    with pytest.raises(ConfigError, match=r"answers-0: 1 samples, of which 1 are long enough\. Expected at least 2"):
        train(settings(), dataset=make_dataset(1))


def test_answers_of_another_target_are_refused(
    train: Callable[..., TrainingResult], settings: MakeSettings, make_dataset: MakeDataset
) -> None:
    with pytest.raises(ConfigError, match=r"come from another model \(fingerprint abc\)"):
        train(settings(), dataset=make_dataset(fingerprint="abc"))


def test_a_damaged_state_is_refused_with_advice(
    train: Callable[..., TrainingResult], settings: MakeSettings, tmp_path: Path
) -> None:
    (tmp_path / "a-work").mkdir()
    (tmp_path / "a-work" / "training_state.pt").write_bytes(b"no state")
    with pytest.raises(ConfigError, match=r"training_state\.pt is not the state of a training run\. Delete it"):
        train(settings())


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_ttt_steps", 0), ("step_decay", 1.5), ("tv_weight", -0.1), ("held_out_share", 0.0), ("budget_s", 0.0)],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"training: {name} is {value!r}, expected"):
        Eagle3Settings(**{name: value})  # type: ignore[arg-type]


def test_training_continues_from_a_given_head(train: Callable[..., TrainingResult], settings: MakeSettings) -> None:
    first = train(settings(num_epochs=1), "first")
    head = str(first.folder)
    kept = train(settings(num_epochs=1, learning_rate=1e-12, start_from=head), "kept")
    assert kept.evaluation.greedy == first.evaluation.greedy
    further = train(settings(num_epochs=3, seed=0, start_from=head), "further")
    assert further.evaluation.greedy.mean_accepted_length > first.evaluation.greedy.mean_accepted_length
    before, after = (load_file(run.folder / "model.safetensors") for run in (first, further))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    assert torch.equal(before["d2t"], after["d2t"])
    card = (further.folder / "README.md").read_text(encoding="utf-8")
    assert "Trained further from an earlier head." in card
    assert str(first.folder.parent) not in card, "the folders of this machine are nobody's business"


def test_card_and_log_have_the_shape_of_the_initial_head(
    train: Callable[..., TrainingResult], settings: MakeSettings, tmp_path: Path
) -> None:
    first = train(settings(num_epochs=1, draft_vocab_size=48, num_kv_heads=4), "first", num_samples=FEW_SAMPLES)
    from_first = settings(num_epochs=1, draft_vocab_size=96, start_from=str(first.folder))
    further = train(from_first, "further", num_samples=FEW_SAMPLES)
    assert load_file(further.folder / "model.safetensors")["lm_head.weight"].shape[0] == 48
    card = (further.folder / "README.md").read_text(encoding="utf-8")
    found = re.search("Settings: `(.*)`", card)
    assert found is not None
    log = json.loads((further.folder / "training_log.json").read_text(encoding="utf-8"))
    for shown in (json.loads(found[1]), log["settings"]):
        assert (shown["draft_vocab_size"], shown["num_kv_heads"], shown["feature_layers"]) == (48, 4, [2, 4, 5])
        assert shown["start_from"] == "first"


def test_a_head_goes_on_with_its_most_frequent_tokens(
    train: Callable[..., TrainingResult], settings: MakeSettings
) -> None:
    first = train(settings(num_epochs=1, draft_vocab_size=48), "first", num_samples=FEW_SAMPLES)
    as_it_is = settings(learning_rate=1e-12, num_epochs=1, draft_vocab_size=16, start_from=str(first.folder))
    smaller = train(as_it_is, "smaller", num_samples=FEW_SAMPLES)
    before, after = (load_file(run.folder / "model.safetensors") for run in (first, smaller))
    ids = [(tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist() for tensors in (before, after)]
    assert len(ids[1]) == 16
    assert set(ids[1]) < set(ids[0])
    kept = [ids[0].index(token_id) for token_id in ids[1]]
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"][kept])
    assert torch.equal(after["t2d"].nonzero().squeeze(1), torch.tensor(ids[1]))
    assert torch.equal(after["fc.weight"], before["fc.weight"])
    assert "| draft vocabulary | 16 tokens, " in (smaller.folder / "README.md").read_text(encoding="utf-8")


def test_a_missing_initial_head_is_refused(train: Callable[..., TrainingResult], settings: MakeSettings) -> None:
    with pytest.raises(ConfigError, match="no/such/head"):
        train(settings(start_from="no/such/head"))


def test_the_bundled_card_has_the_shape_of_its_head() -> None:
    folder = default_draft(DEFAULT_MODEL_NAME)
    assert folder is not None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = re.search("Settings: `(.*)`", (folder / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    for shown in (json.loads(found[1]), log["settings"]):
        assert shown["draft_vocab_size"] == config["draft_vocab_size"]
        assert shown["num_kv_heads"] == config["num_key_value_heads"]
