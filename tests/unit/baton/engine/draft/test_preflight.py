"""The check before loading refuses exactly the drafts that the loaders would refuse, with the same messages."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import BatonError, ConfigError, UnsupportedModelError
from baton.engine.draft.loading import load_draft
from baton.engine.draft.preflight import check_draft
from baton.engine.models.model_loader import prepare_model
from tests.tiny_drafts import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    TinyDraft,
    tiny_draft_lm,
    tiny_eagle,
    tiny_eagle3,
    tiny_medusa_v1,
    tiny_medusa_vllm,
    tiny_narrow_eagle3,
    tiny_speculators,
    tiny_target,
)
from tests.tiny_tokenizers import byte_level_tokenizer

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "model"
    tiny_target().save_pretrained(folder)
    byte_level_tokenizer()._hf.save_pretrained(folder)
    return folder


def check(folder: Path | str, model_folder: Path, method: str = "auto") -> None:
    check_draft(str(folder), method, "some/model", model_folder)


def _truncated_medusa() -> TinyDraft:
    draft = tiny_medusa_vllm()
    draft.config["truncated_vocab_size"] = DRAFT_VOCAB
    draft.tensors["token_map"] = torch.arange(DRAFT_VOCAB)
    return draft


FITTING: dict[str, tuple[TinyDraft, str]] = {
    "EAGLE": (tiny_eagle(), SAFE),
    "EAGLE-3": (tiny_eagle3(), SAFE),
    "EAGLE-3, pickled": (tiny_eagle3(), PICKLED),
    "EAGLE-3, narrow": (tiny_narrow_eagle3(), SAFE),
    "EAGLE-3, narrow and pickled": (tiny_narrow_eagle3(), PICKLED),
    "EAGLE-3, layers": (tiny_eagle3(num_features=2, **{LAYER_IDS: [1, 4]}), SAFE),
    "speculators": (tiny_speculators(kind="qwen3", num_layers=2), SAFE),
    "speculators, pickled": (tiny_speculators(), PICKLED),
    "Medusa": (tiny_medusa_v1(), "medusa_lm_head.pt"),
    "vLLM's Medusa": (tiny_medusa_vllm(prefix="medusa_heads."), SAFE),
    "Medusa, truncated": (_truncated_medusa(), SAFE),
}


@pytest.mark.parametrize("name", FITTING)
def test_drafts_that_load_pass_the_preflight(name: str, model_folder: Path, tmp_path: Path) -> None:
    draft, file = FITTING[name]
    folder = draft.write(tmp_path / "draft", file)
    check(folder, model_folder)
    assert load_draft(str(folder), "some/model", str(model_folder), prepare_model(tiny_target(), "float32"))


def _without(draft: TinyDraft, *names: str) -> TinyDraft:
    return TinyDraft(draft.config, {name: t for name, t in draft.tensors.items() if name not in names})


def _other_medusa(hidden: int = HIDDEN, vocab: int = VOCAB) -> TinyDraft:
    tensors = {"blocks.0.layers.0.weight": torch.ones(hidden, hidden), "lm_heads.0.weight": torch.ones(vocab, hidden)}
    return TinyDraft({"model_type": "medusa"}, tensors)


REFUSED: dict[str, tuple[TinyDraft, str]] = {
    "vocabulary": (tiny_eagle3(vocab_size=97), SAFE),
    "vocabulary, pickled": (tiny_eagle3(vocab_size=97), PICKLED),
    "vocabulary of an EAGLE-1 head": (tiny_eagle(vocab_size=97), SAFE),
    "vocabulary, nested": (tiny_speculators(layer={"vocab_size": 97}), SAFE),
    "hidden size of the target": (tiny_eagle3(target_hidden_size=64), SAFE),
    "hidden size, pickled": (tiny_eagle3(target_hidden_size=64), PICKLED),
    "narrow without an embedding": (_without(tiny_narrow_eagle3(), "embed_tokens.weight"), SAFE),
    "layers": (tiny_eagle3(**{LAYER_IDS: [2, 4, 9]}), SAFE),
    "features": (tiny_eagle3(num_features=2, **{LAYER_IDS: [1, 3, 4]}), SAFE),
    "draft vocabulary": (tiny_eagle3(draft_vocab_size=VOCAB + 1), SAFE),
    "lm_head": (tiny_eagle3(draft_vocab_size=41), SAFE),
    "number of layers": (tiny_eagle(num_hidden_layers=2), SAFE),
    "kind of layers": (tiny_eagle3(model_type="gemma2"), SAFE),
    "P-EAGLE": (tiny_speculators(speculators_model_type="peagle"), SAFE),
    "MTP": (tiny_eagle3(num_nextn_predict_layers=1), SAFE),
    "no format": (TinyDraft({}, {"x": torch.zeros(1)}), SAFE),
    "no nested config": (tiny_speculators(transformer_layer_config=None), SAFE),
    "Medusa's hidden size": (_other_medusa(hidden=64), SAFE),
    "Medusa's vocabulary": (_other_medusa(vocab=97), SAFE),
    "Medusa without its map": (_without(_truncated_medusa(), "token_map"), SAFE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misfits_are_refused_with_the_text_of_the_loader(name: str, model_folder: Path, tmp_path: Path) -> None:
    draft, file = REFUSED[name]
    folder = draft.write(tmp_path / "draft", file)
    with pytest.raises(BatonError) as early:
        check(folder, model_folder)
    with pytest.raises(BatonError) as late:
        load_draft(str(folder), "some/model", str(model_folder), prepare_model(tiny_target(), "float32"))
    assert (type(early.value), str(early.value)) == (type(late.value), str(late.value))


def test_missing_drafts_are_refused(model_folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for reference, reason in ((tmp_path / "none", "does not exist"), (empty, "no config.json")):
        with pytest.raises(ConfigError, match=reason):
            check(reference, model_folder)
    (empty / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="contains no weights"):
        check(empty, model_folder)


@pytest.mark.parametrize("content", [b"", b"garbage" * 50, (10).to_bytes(8, "little") + b"[1, 2, 3] "])
def test_a_file_that_is_not_a_checkpoint_is_refused(content: bytes, model_folder: Path, tmp_path: Path) -> None:
    folder = tiny_eagle3().write(tmp_path / "draft")
    (folder / SAFE).write_bytes(content)
    with pytest.raises(ConfigError, match="could not be read"):
        check(folder, model_folder)


def test_a_truncated_file_is_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = tiny_eagle3().write(tmp_path / "draft")
    (folder / SAFE).write_bytes((folder / SAFE).read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"is truncated\. Copy or download the checkpoint again\."):
        check(folder, model_folder)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"x": SAFE}, "lists tensors that its files do not contain: x"),
        ({"x": "other.safetensors"}, "not in the same folder"),
    ],
)
def test_an_index_that_does_not_match_its_files_is_refused(
    index: dict[str, str], reason: str, model_folder: Path, tmp_path: Path
) -> None:
    folder = tiny_eagle3().write(tmp_path / "draft")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ConfigError, match=reason):
        check(folder, model_folder)


def test_a_method_without_its_draft_is_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = tiny_eagle3().write(tmp_path / "draft")
    check(folder, model_folder, "eagle3")
    with pytest.raises(ConfigError, match=r"is medusa, but .* is for the method eagle3"):
        check(folder, model_folder, "medusa")
    with pytest.raises(ConfigError, match="is eagle, but no draft is loaded"):
        check("none", model_folder, "eagle")
    check("none", model_folder, "suffix")


def _draft_model(folder: Path) -> Path:
    tiny_draft_lm().save_pretrained(folder)
    byte_level_tokenizer()._hf.save_pretrained(folder)
    return folder


def test_a_draft_model_of_another_vocabulary_is_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = _draft_model(tmp_path / "small")
    check(folder, model_folder, "draft_model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[30:32]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedModelError, match="a different vocabulary than the target: token"):
        check(folder, model_folder)


def test_a_draft_model_without_weights_is_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = _draft_model(tmp_path / "small")
    (folder / SAFE).unlink()
    with pytest.raises(ConfigError, match="contains no weights"):
        check(folder, model_folder)


def test_an_unused_index_beside_a_complete_file_is_ignored(model_folder: Path, tmp_path: Path) -> None:
    """transformers loads such a folder."""
    folder = _draft_model(tmp_path / "small")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check(folder, model_folder, "draft_model")


def test_a_target_without_known_sizes_is_left_to_the_workers(tmp_path: Path) -> None:
    """Sizes that only the architecture's own code knows."""
    folder = tiny_eagle3(vocab_size=97).write(tmp_path / "draft")
    model = tmp_path / "model"
    model.mkdir()
    for config in ({}, {"thinker_config": {}, "vocab_size": 5, "hidden_size": 5, "num_hidden_layers": 5}):
        (model / "config.json").write_text(json.dumps(config))
        check(folder, model)


@pytest.mark.parametrize("value", [None, "x", -1, 0, [], {}, {"a": 1}, 1.5, 10**12, ["a"]], ids=repr)
def test_every_wrong_config_value_is_refused_with_a_reason(value: Any, model_folder: Path, tmp_path: Path) -> None:
    for draft in (tiny_eagle3(), tiny_speculators(), _truncated_medusa()):
        folder = draft.write(tmp_path / "draft")
        nested = draft.config.get("transformer_layer_config", {})
        changed = [{**draft.config, key: value} for key in (*draft.config, "eagle_config", "target_hidden_size")]
        changed += [{**draft.config, "transformer_layer_config": {**nested, key: value}} for key in nested]
        for config in changed:
            (folder / "config.json").write_text(json.dumps(config))
            with contextlib.suppress(BatonError):
                check(folder, model_folder)


def test_the_preflight_does_not_import_torch() -> None:
    code = "import sys, baton.engine.draft.preflight; print({'torch', 'safetensors'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
