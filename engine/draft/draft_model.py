"""A smaller causal language model that drafts for a larger one of the same vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import ConfigError, UnsupportedModelError
from engine.model_loader import LoadedModel, load_model
from engine.model_source import resolve_model
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DraftModel:
    """
    Attributes:
        loaded: the draft, ready for a :class:`engine.model_runner.ModelRunner` of its own.
        num_shared_tokens: both models know the ids below this. The rows of logits from there on are padding of one
            model, which the other neither reads nor says.
    """

    loaded: LoadedModel
    num_shared_tokens: int


def load_draft_model(
    reference: str,
    target: LoadedModel,
    target_tokenizer: Tokenizer,
    device: torch.device,
    dtype: str = "auto",
) -> DraftModel:
    """Loads a model of transformers and makes sure that its tokens are the target's.

    Args:
        reference: anything that ``model:`` may name.
        dtype: as for :func:`engine.model_loader.load_model`.

    Raises:
        ConfigError: the model or its tokenizer cannot be found or read.
        UnsupportedModelError: it cannot run on this engine, or its vocabulary is another one.
    """
    source = resolve_model(reference)
    try:
        tokenizer = Tokenizer.load(source.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft model {source.name}: its tokenizer could not be read: {error}") from error
    # Before the weights: the comparison takes milliseconds.
    check_same_vocabulary(source.name, tokenizer, target_tokenizer)
    loaded = load_model(source, dtype, device)
    if loaded.vocab_size < min(target.vocab_size, target_tokenizer.vocab_size):
        raise UnsupportedModelError(
            f"draft model {source.name} has rows for {loaded.vocab_size} tokens only, but the target may say any of "
            f"{min(target.vocab_size, target_tokenizer.vocab_size)}."
        )
    return DraftModel(loaded, min(loaded.vocab_size, target.vocab_size))


def check_same_vocabulary(name: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Every id stands for the same bytes in both. How many rows of padding follow in either model does not matter.

    Raises:
        UnsupportedModelError: an id differs; the message shows the first one.
    """
    hint = "Use a draft model of the target's own family."
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"draft model {name} has a vocabulary of {draft.vocab_size} tokens, the target one of "
            f"{target.vocab_size}. {hint}"
        )
    for token_id in range(target.vocab_size):
        ours, theirs = target.token_bytes(token_id), draft.token_bytes(token_id)
        if ours != theirs or target.is_special(token_id) != draft.is_special(token_id):
            raise UnsupportedModelError(
                f"draft model {name} has another vocabulary than the target: token {token_id} is {theirs!r} there "
                f"and {ours!r} in the target. {hint}"
            )
