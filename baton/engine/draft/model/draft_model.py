"""A smaller causal language model that drafts for a larger one of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import LayerSpec
from baton.engine.attention.base import ATTENTION_NAME, AttentionSlot, bind_slot
from baton.engine.batch.attention_groups import Span
from baton.engine.device.uploads import upload_ints
from baton.engine.draft.rows import DraftRows
from baton.engine.models.model_loader import LoadedModel, accepts_logits_to_keep, load_model
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.engine.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Implements :class:`baton.engine.contracts.DraftNetwork`.

    Attributes:
        loaded: the draft.
        num_shared_tokens: both models have the ids below this. Later rows of logits are padding of one model, which is
            neither read nor drafted.
    """

    loaded: LoadedModel
    num_shared_tokens: int

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Empty, since it reads only tokens."""
        return ()

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        return tuple(layer.spec for layer in self.loaded.attention_layers)

    @property
    def max_positions(self) -> int:
        """The draft's own context length; it never sees a token beyond it."""
        return self.loaded.max_model_len

    def fingerprint(self) -> str:
        return self.loaded.fingerprint


class PagedDraftModel:
    """A draft model that runs in the cache of its target.

    Args:
        draft: the draft; binds its attention layers to this cache.
        runner: runner of the target, built with ``draft`` as its draft.

    Raises:
        ValueError: the runner was built without this draft, or its cache has another dtype.
    """

    def __init__(self, draft: DraftModel, runner: ModelRunner) -> None:
        if runner.spec.draft_fingerprint != draft.fingerprint() or runner.spec.draft_layers != draft.layer_specs:
            raise ValueError("the runner was built without this draft")
        if draft.loaded.dtype_name != runner.spec.dtype:
            raise ValueError(
                f"the draft model computes in {draft.loaded.dtype_name}, but the cache holds {runner.spec.dtype}"
            )
        self.draft = draft
        self._runner = runner
        self._mask_dtype = runner.cache.keys[-1].dtype
        first_layer = len(runner.spec.layers)
        self._slots = [
            AttentionSlot(first_layer + index, runner.backend, layer.sliding_window)
            for index, layer in enumerate(draft.loaded.attention_layers)
        ]
        for layer, slot in zip(draft.loaded.attention_layers, self._slots, strict=True):
            bind_slot(layer.module, slot)
        draft.loaded.model.set_attn_implementation(ATTENTION_NAME)
        self._selects_rows = accepts_logits_to_keep(draft.loaded.model)

    def forward(self, spans: Sequence[Span], token_ids: Sequence[int]) -> torch.Tensor:
        """Computes rows, each of which is a token at its own position, and stores their KV.

        Args:
            spans: places of the rows.
            token_ids: tokens of all rows, one span after the other.

        Returns:
            Logits ``[len(spans), num_shared_tokens]`` of each span's last row.
        """
        device = self._runner.device
        rows = DraftRows.build(spans, self._runner.spec.block_size, device, self._mask_dtype)
        # A token that only the target has is padding; any id of the draft's can replace it.
        tokens = upload_ints(token_ids, device).clamp_max(self.draft.loaded.vocab_size - 1)
        last = upload_ints(rows.last, device)
        kwargs = {"logits_to_keep": last} if self._selects_rows else {}
        for slot in self._slots:
            slot.batch = rows
        try:
            output = self.draft.loaded.model(
                input_ids=tokens[None], position_ids=rows.positions[None], use_cache=False, **kwargs
            )
        finally:
            for slot in self._slots:
                slot.batch = None
        logits: torch.Tensor = output.logits[0] if self._selects_rows else output.logits[0][last]
        return logits[:, : self.draft.num_shared_tokens]


def load_draft_model(
    reference: str,
    target: LoadedModel,
    target_tokenizer: Tokenizer,
    device: torch.device,
    dtype: str = "auto",
) -> DraftModel:
    """Loads a transformers model, dequantized, and checks that its vocabulary is the target's.

    Args:
        reference: anything that ``model:`` may name.
        dtype: as for :func:`baton.engine.models.model_loader.load_model`; to share a cache, it must be the target's.

    Raises:
        ConfigError: the model or its tokenizer cannot be found or read.
        UnsupportedModelError: it cannot run on this engine, or its vocabulary differs.
    """
    source = resolve_model(reference)
    tokenizer = Tokenizer.load(source.path)
    # Before loading the weights: the comparison takes milliseconds.
    check_same_vocabulary(source.name, tokenizer, target_tokenizer)
    loaded = load_model(source, dtype, device, "dequantized")
    if loaded.vocab_size < min(target.vocab_size, target_tokenizer.vocab_size):
        raise UnsupportedModelError(
            f"draft model {source.name} has embeddings for only {loaded.vocab_size} tokens, but the "
            "target can generate any of "
            f"{min(target.vocab_size, target_tokenizer.vocab_size)}."
        )
    return DraftModel(loaded, min(loaded.vocab_size, target.vocab_size))


def check_same_vocabulary(name: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Checks that every id has the same bytes in both. The number of padding rows in either model does not matter.

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
                f"draft model {name} has a different vocabulary than the target: token {token_id} is "
                f"{theirs!r} in the draft "
                f"and {ours!r} in the target. {hint}"
            )
