"""Every kind of reference in ``speculation.draft``, and the draft that it loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.core.roles import BUNDLED_DRAFTS
from baton.engine.draft.checkpoint_files import CONFIG_NAME
from baton.engine.draft.loading import load_draft
from baton.engine.draft.references import bundled_draft, default_draft, kind_of, resolve_draft
from baton.engine.models.float32_products import LEAST_ROWS
from baton.engine.models.model_loader import LoadedModel, prepare_model
from tests.tiny_drafts import (
    TinyDraft,
    tiny_draft_lm,
    tiny_eagle,
    tiny_eagle3,
    tiny_medusa_v1,
    tiny_medusa_vllm,
    tiny_speculators,
    tiny_target,
)
from tests.tiny_tokenizers import byte_level_tokenizer

SIZE = byte_level_tokenizer().vocab_size
_LARGEST_BUNDLE = 20_000_000  # bytes; every installation has them


@pytest.fixture
def target() -> LoadedModel:
    return prepare_model(tiny_target(), "float32")


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    byte_level_tokenizer()._hf.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


KINDS: dict[str, tuple[Callable[[], TinyDraft], str, str]] = {
    "EAGLE": (tiny_eagle, "model.safetensors", "eagle"),
    "EAGLE-3": (tiny_eagle3, "model.safetensors", "eagle3"),
    "speculators": (tiny_speculators, "model.safetensors", "eagle3"),
    "Medusa": (tiny_medusa_v1, "medusa_lm_head.pt", "medusa"),
    "vLLM's Medusa": (tiny_medusa_vllm, "model.safetensors", "medusa"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_draft_is_detected(kind: str, target: LoadedModel, model_path: str, tmp_path: Path) -> None:
    make, name, method = KINDS[kind]
    folder = make().write(tmp_path / "draft", name)
    draft = load_draft(str(folder), "some/model", model_path, target)
    assert draft is not None
    assert (draft.method, draft.name) == (method, str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_uses_float32_products_without_bfloat16_instructions(
    kind: str, model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiplied: list[torch.dtype]
) -> None:
    make, name, _ = KINDS[kind]
    folder = make().write(tmp_path / "draft", name)
    for has_instructions in (True, False):
        monkeypatch.setattr(
            "baton.engine.models.float32_products.has_bfloat16", lambda device, found=has_instructions: found
        )
        draft = load_draft(str(folder), "some/model", model_path, prepare_model(tiny_target().bfloat16(), "bfloat16"))
        assert draft is not None
        assert isinstance(draft.network, nn.Module)
        multiplied.clear()
        for layer in draft.network.modules():
            if isinstance(layer, nn.Linear):
                layer(torch.zeros(LEAST_ROWS, layer.in_features, dtype=torch.bfloat16))
        assert set(multiplied) == (set() if has_instructions else {torch.float32})


def test_a_model_with_a_tokenizer_is_a_draft_model(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    tiny_draft_lm(vocab=SIZE).save_pretrained(folder)
    byte_level_tokenizer()._hf.save_pretrained(folder)
    target = prepare_model(tiny_target(vocab=SIZE), "float32")
    draft = load_draft(str(folder), "some/model", str(folder), target)
    assert draft is not None
    assert draft.method == "draft_model"


def test_ambiguous_layer_ids_are_resolved_by_trying(target: LoadedModel, model_path: str, tmp_path: Path) -> None:
    folder = tiny_eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}).write(tmp_path / "draft")
    draft = load_draft(str(folder), "some/model", model_path, target)
    assert draft is not None
    assert draft.network.feature_layers in ((1, 3, 5), (2, 4, 6))


def test_no_draft_is_loaded_when_none_is_configured(target: LoadedModel, model_path: str) -> None:
    assert load_draft("none", "default", model_path, target) is None
    assert load_draft("auto", "some/model", model_path, target) is None
    assert default_draft("some/model") is None


@pytest.mark.parametrize("name", BUNDLED_DRAFTS)
def test_bundled_drafts_go_by_their_names(name: str) -> None:
    folder = bundled_draft(name)
    assert resolve_draft(name, "default") == folder
    assert kind_of(folder) == ("eagle" if name == "eagle3" else name)
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert {CONFIG_NAME, "model.safetensors", "README.md", "training_log.json"} <= files.keys()
    assert sum(files.values()) <= _LARGEST_BUNDLE
    with pytest.raises(ConfigError, match=rf"speculation\.draft is {name}, which comes with the default model .*some/"):
        resolve_draft(name, "some/model")


@pytest.mark.parametrize("method", ["auto", "none", "suffix", "eagle", None])
def test_auto_is_the_bundled_head_of_the_default_model(method: str | None) -> None:
    assert resolve_draft("auto", "default", method) == bundled_draft("eagle3")


@pytest.mark.parametrize("name", BUNDLED_DRAFTS)
def test_auto_is_the_draft_of_a_method_that_has_one(name: str) -> None:
    assert resolve_draft("auto", "default", name) == bundled_draft(name)
    assert resolve_draft("auto", "some/model", name) is None


def test_missing_drafts_are_refused(target: LoadedModel, model_path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*for the default model, eagle3, medusa, draft_model"):
        load_draft(str(tmp_path / "nowhere"), "some/model", model_path, target)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises((ConfigError, UnsupportedModelError), match="empty"):
        load_draft(str(empty), "some/model", model_path, target)
