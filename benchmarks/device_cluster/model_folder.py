"""A model of random weights as a checkpoint on disk, with a tokenizer: what a cluster needs to serve it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.device_run.random_model import make_model

_VOCAB_SIZE = 300


def write_model(folder: Path, shape: str, device: torch.device) -> Path:
    """Writes config, weights and a byte-level tokenizer, unless they are there. Equal calls give equal weights.

    The tokenizer knows fewer tokens than the model, so most tokens have no text; requests and answers are compared by
    their token ids.
    """
    if (folder / "tokenizer.json").exists():
        return folder
    make_model(shape, device).to("cpu").save_pretrained(folder)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>").save_pretrained(folder)
    return folder
