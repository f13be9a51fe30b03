"""The fused decoder as a forward pass of the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from baton.core.errors import UnsupportedModelError
from baton.engine.batch.batch import ForwardBatch
from baton.engine.batch.hidden_states import FINAL_HIDDEN, HiddenStates
from baton.engine.cpu.forward import MAX_THREADS, FusedForward, Table
from baton.engine.cpu.quantization import quantize
from baton.engine.cpu.structure import read_decoder
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models.model_loader import LoadedModel

logger = logging.getLogger(__name__)


class FusedDecoder:
    """Implements :class:`baton.engine.runner.forward_pass.ForwardPass`.

    Reads the model's weights in place, so it costs no memory and the model stays usable; int8 and int4 weights are
    copies, of a byte or five bits each.

    Args:
        feature_layers: hidden states that a draft reads, see :class:`baton.engine.batch.hidden_states.FeatureTap`.
        weights: one of :data:`baton.engine.runner.options.FUSED_WEIGHTS`.

    Raises:
        NotFusableError: the program does not support the model's structure, or it cannot be compiled.
        UnsupportedModelError: the model has no such hidden state.
    """

    def __init__(
        self, loaded: LoadedModel, cache: PagedKVCache, feature_layers: Sequence[int] = (), weights: str = "native"
    ) -> None:
        decoder = read_decoder(loaded)
        if torch.get_num_threads() > MAX_THREADS:
            logger.info("the fused decoder computes with %d of %d threads", MAX_THREADS, torch.get_num_threads())
        if weights != "native":
            decoder = quantize(decoder, weights)
        self._hidden_size = decoder.embedding.shape[1]
        self.features = FusedFeatures(feature_layers) if feature_layers else None
        count = len(decoder.layers)  # a draft's KV follows the model's
        columns = feature_columns(feature_layers, count)
        self._forward = FusedForward(decoder, cache.keys[:count], cache.values[:count], cache.spec.block_size, columns)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        spans = [span for group in batch.groups for span in group.spans]
        logits, states = self._forward.run(batch.token_ids, batch.positions, batch.slots, spans, batch.logit_rows)
        if self.features is not None:
            self.features.keep(states, self._hidden_size)
        return logits

    @property
    def has_tiles(self) -> bool:
        """Whether a matrix unit computes the products."""
        return self._forward.has_tiles

    def close(self) -> None:
        """Ends the threads."""
        self._forward.close()


class FusedFeatures(HiddenStates):
    """Hidden states of the last forward."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._order = tuple(layers)
        self._states: torch.Tensor | None = None

    def keep(self, states: torch.Tensor, hidden_size: int) -> None:
        """Stores a forward's output: the distinct states, in the order of their layers, the normed one last."""
        distinct = sorted(set(self._order), key=lambda layer: (layer == FINAL_HIDDEN, layer))
        if list(self._order) != distinct:
            parts = torch.unflatten(states, -1, (-1, hidden_size)).unbind(1)
            states = torch.cat([parts[distinct.index(layer)] for layer in self._order], dim=-1)
        self._states = states

    def take(self) -> torch.Tensor:
        states, self._states = self._states, None
        if states is None:
            raise RuntimeError("there was no forward to take features from")
        return states

    def close(self) -> None:
        """Drops the stored states."""
        self._states = None


def feature_columns(layers: Sequence[int], num_layers: int) -> Table:
    """Columns of the requested hidden states, in the order of their layers, the normed one last."""
    columns = np.full(num_layers + 2, -1, dtype=np.int64)
    for index in layers:
        if not FINAL_HIDDEN <= index <= num_layers:
            raise UnsupportedModelError(f"hidden state {index} was requested, but the model has {num_layers} layers.")
        columns[num_layers + 1 if index == FINAL_HIDDEN else index] = 0
    wanted = np.flatnonzero(columns == 0)
    columns[wanted] = np.arange(len(wanted))
    return columns
