"""``dtype: auto`` on CPUs without instructions for bfloat16: as the checkpoint is, if the fused decoder computes it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baton.core.errors import ConfigError
from baton.engine.models.float32_products import LEAST_ROWS
from baton.engine.models.model_loader import LoadedModel, load_model, own_logits
from baton.engine.models.model_source import ModelSource
from baton.engine.runner import forward_choice, served_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.served_model import load_served_model
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("runner.served_model", "models.model_loader", "models.float32_products"):
        monkeypatch.setattr(f"baton.engine.{module}.has_bfloat16", lambda device: False)


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return saved("llama", tmp_path)


def saved(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> ModelSource:
    tiny_model(name).to(dtype).save_pretrained(folder)
    return ModelSource(str(folder), name)


def test_bfloat16_is_kept_if_the_fused_decoder_supports_it(source: ModelSource) -> None:
    loaded = load_served_model(source, "auto", CPU)
    assert loaded.dtype_name == "bfloat16"
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "settings",
    [{"decoder": "transformers"}, {"dtype": "float32"}],
    ids=["own modules", "asked for"],
)
def test_float32_is_chosen_if_bfloat16_is_slow(source: ModelSource, settings: dict[str, str]) -> None:
    loaded = load_served_model(source, **{"dtype": "auto", "device": CPU} | settings)  # type: ignore[arg-type]
    assert loaded.dtype_name == "float32"


def test_modules_in_fp8_do_not_select_bfloat16(source: ModelSource) -> None:
    with pytest.raises(ConfigError, match="dtype: bfloat16"):
        load_served_model(source, "auto", CPU, "fp8")


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "granite"])
def test_models_outside_the_fused_decoder_use_float32(name: str, tmp_path: Path) -> None:
    """The fused decoder accepts granite at first, and rejects it after comparing logits."""
    loaded = load_served_model(saved(name, tmp_path), "auto", CPU)
    assert loaded.dtype_name == "float32"
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}


def test_float32_checkpoints_stay_float32(tmp_path: Path) -> None:
    assert load_served_model(saved("llama", tmp_path, torch.float32), "auto", CPU).dtype_name == "float32"


def test_float32_is_used_without_numba(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "baton.engine.cpu.decoder", None)
    assert load_served_model(source, "auto", CPU).dtype_name == "float32"


def test_an_explicit_dtype_is_loaded_once(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(source: ModelSource, dtype: str, *others: Any) -> LoadedModel:
        asked.append(dtype)
        return load_model(source, dtype, *others)

    monkeypatch.setattr(served_model, "load_model", noted)
    assert load_served_model(source, "bfloat16", CPU).dtype_name == "bfloat16"
    monkeypatch.setattr(served_model, "has_bfloat16", lambda device: True)
    load_served_model(source, "auto", CPU)
    assert asked == ["bfloat16", "auto"]


def test_decoders_are_compared_once(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time costs a tenth of a second or more of a start."""
    compared: list[int] = []

    def noted(model: PreTrainedModel, token_ids: Sequence[int], first_position: int = 0) -> torch.Tensor:
        compared.append(first_position)
        return own_logits(model, token_ids, first_position)

    monkeypatch.setattr(forward_choice, "own_logits", noted)
    loaded = load_served_model(source, "auto", CPU)
    assert sorted(compared) == [0, loaded.max_model_len - 13]
    assert ModelRunner(loaded, 2, 16).is_fused
    assert ModelRunner(loaded, 2, 16, RunnerOptions(weights="int8")).is_fused
    assert len(compared) == 2
    ModelRunner(load_model(source, "bfloat16", CPU), 2, 16)
    assert len(compared) == 4


def test_a_loaded_model_multiplies_many_rows_as_float32(source: ModelSource, multiplied: list[torch.dtype]) -> None:
    loaded = load_served_model(source, "auto", CPU)
    multiplied.clear()  # those that the decoders were compared by
    rows = torch.zeros(LEAST_ROWS, loaded.model.config.hidden_size, dtype=torch.bfloat16)
    assert loaded.model.lm_head(rows).dtype is torch.bfloat16
    assert multiplied == [torch.float32]
