"""Computes a step by transformers' own modules; the interface is shared with the fused decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.engine.attention.base import ATTENTION_NAME, AttentionBackend, AttentionBatch, AttentionSlot, bind_slot
from baton.engine.batch.batch import ForwardBatch, ModelInput
from baton.engine.batch.hidden_states import FeatureTap, HiddenStates
from baton.engine.models.model_loader import LoadedModel, accepts_logits_to_keep


class ForwardPass(Protocol):
    """Computes batches over a paged cache.

    Attributes:
        features: hidden states of the last forward; ``None`` if no draft reads them.
    """

    @property
    def features(self) -> HiddenStates | None: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Computes the batch and stores its KV.

        Returns:
            Logits, float32 ``[num_rows, vocab_size]``, of ``batch.logit_rows``.
        """
        ...

    def close(self) -> None:
        """Frees what the pass holds; the model itself stays usable."""
        ...


class TransformersForward:
    """Implements :class:`ForwardPass` for every model: its own modules, with attention over the paged cache.

    Several instances may share a model, each over a cache of its own; they compute one after the other.

    Args:
        feature_layers: hidden states that a draft reads, see :class:`baton.engine.batch.hidden_states.FeatureTap`.
    """

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend, feature_layers: Sequence[int] = ()) -> None:
        self._model = loaded.model
        self.features = FeatureTap(loaded.model, feature_layers) if feature_layers else None
        self._slots = [
            (layer.module, AttentionSlot(index, backend, layer.sliding_window))
            for index, layer in enumerate(loaded.attention_layers)
        ]
        loaded.model.set_attn_implementation(ATTENTION_NAME)
        self._selects_rows = accepts_logits_to_keep(loaded.model)

    def forward(self, batch: ModelInput) -> torch.Tensor:
        return self.compute(batch.token_ids, batch.positions, batch.logit_rows, batch)

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Like :meth:`forward`, from the parts of a :class:`baton.engine.batch.batch.ForwardBatch`."""
        for module, slot in self._slots:
            bind_slot(module, slot)
            slot.batch = batch
        kwargs = {"logits_to_keep": logit_rows} if self._selects_rows else {}
        try:
            output = self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **kwargs)
        finally:
            for _, slot in self._slots:
                slot.batch = None
        logits: torch.Tensor = output.logits[0]
        if not self._selects_rows:
            logits = logits[logit_rows]
        return logits.float()

    def close(self) -> None:
        """Removes the hooks from the model."""
        if self.features is not None:
            self.features.close()
