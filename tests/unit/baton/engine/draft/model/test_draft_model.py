"""A draft model must speak the target's vocabulary, padding aside."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import nn
from transformers import PreTrainedTokenizerFast

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.draft.model.draft_model import load_draft_model
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.models.tokenizer import Tokenizer
from tests.quantized.make_checkpoints import FOLDER
from tests.tiny_drafts import tiny_target

CPU = torch.device("cpu")
WORDS = ("a", "b", "c", "d", "e", "<|eos|>")


def tokenizer(words: tuple[str, ...] = WORDS, special: str = "<|eos|>") -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special)


def write(folder: Path, words: tuple[str, ...] = WORDS, rows: int = 8, special: str = "<|eos|>") -> str:
    tiny_target(num_layers=1, vocab=rows).save_pretrained(folder)
    tokenizer(words, special).save_pretrained(folder)
    return str(folder)


def target(rows: int = 8) -> LoadedModel:
    return prepare_model(tiny_target(num_layers=2, vocab=rows), "float32")


@pytest.mark.parametrize(("rows", "target_rows", "shared"), [(8, 8, 8), (8, 12, 8), (16, 8, 8)])
def test_the_same_vocabulary_is_accepted_with_any_padding(
    rows: int, target_rows: int, shared: int, tmp_path: Path
) -> None:
    draft = load_draft_model(write(tmp_path, rows=rows), target(target_rows), Tokenizer(tokenizer()), CPU)
    assert draft.num_shared_tokens == shared
    assert draft.loaded.vocab_size == rows
    assert len(draft.loaded.attention_layers) == 1


def test_a_quantized_draft_is_dequantized(tmp_path: Path) -> None:
    folder = tmp_path / "gptq"
    shutil.copytree(FOLDER / "gptq", folder)
    tokenizer().save_pretrained(folder)
    draft = load_draft_model(str(folder), target(128), Tokenizer(tokenizer()), CPU)
    assert {type(module) for module in draft.loaded.model.model.layers[0].mlp.children()} >= {nn.Linear}


@pytest.mark.parametrize(
    ("words", "special", "reason"),
    [
        ((*WORDS[:-1], "f", "<|eos|>"), "<|eos|>", "vocabulary of 7 tokens, the target one of 6"),
        (("a", "c", "b", "d", "e", "<|eos|>"), "<|eos|>", "token 1 is b'c' in the draft and b'b'"),
        (("a", "b", "c", "d", "e", "<|end|>"), "<|end|>", "token 5"),
    ],
    ids=["size", "order", "special"],
)
def test_another_vocabulary_is_refused(words: tuple[str, ...], special: str, reason: str, tmp_path: Path) -> None:
    folder = write(tmp_path, words, special=special)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_draft_model(folder, target(), Tokenizer(tokenizer()), CPU)


def test_a_draft_with_too_few_rows_for_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="embeddings for only 5 tokens"):
        load_draft_model(write(tmp_path, rows=5), target(), Tokenizer(tokenizer()), CPU)


def test_a_missing_model_or_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a local folder"):
        load_draft_model(str(tmp_path / "none"), target(), Tokenizer(tokenizer()), CPU)
    tiny_target(num_layers=1, vocab=8).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_draft_model(str(tmp_path), target(), Tokenizer(tokenizer()), CPU)
