"""Everything that happens on the device: the model, its cache, and one forward at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.attention.base import ATTENTION_NAME, AttentionSlot, bind_slot
from engine.attention.registry import create_backend
from engine.batch import ForwardBatch
from engine.block_manager import BlockManager
from engine.draft.network import DraftNetwork
from engine.errors import UnsupportedModelError
from engine.feature_tap import FeatureTap
from engine.kv_cache import PagedKVCache, slot_of
from engine.model_loader import LoadedModel, accepts_logits_to_keep
from engine.request import Request, SamplingParams
from engine.scheduler import ScheduledSequence

_CHECK_CHUNKS = (7, 4, 1, 1)
# Relative error of the logits, by dtype, above which the paged path computes something else than the model does.
# Rounding stays an order of magnitude below; a lost state, mask or position is an order of magnitude above.
_CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


class ModelRunner:
    """Runs a loaded model over a paged cache.

    Args:
        loaded: the model.
        num_blocks: size of the cache.
        block_size: tokens per block.
        attention_backend: name, see ``attention/registry.py``.
        draft: keeps its KV in the same blocks, behind the model's layers, and reads the model's hidden states.

    Attributes:
        features: the hidden states that the draft asked for, of the last forward; None when it asked for none.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        attention_backend: str = "auto",
        draft: DraftNetwork | None = None,
    ) -> None:
        self.loaded = loaded
        self.device = loaded.model.device
        layers = loaded.attention_layers
        self.spec = loaded.kv_spec(block_size)
        if draft is not None:
            self.spec = self.spec.with_draft(draft.fingerprint(), draft.layer_specs)
        self.cache = PagedKVCache(self.spec, num_blocks, self.device)
        self.backend = create_backend(attention_backend, self.cache)
        layers_read = () if draft is None else draft.feature_layers
        self.features = FeatureTap(loaded.model, layers_read) if layers_read else None
        self._slots = [AttentionSlot(index, self.backend, layer.sliding_window) for index, layer in enumerate(layers)]
        for layer, slot in zip(layers, self._slots, strict=True):
            bind_slot(layer.module, slot)
        loaded.model.set_attn_implementation(ATTENTION_NAME)
        self._selects_rows = accepts_logits_to_keep(loaded.model)

    def close(self) -> None:
        """Gives the cache's memory back. Nothing runs here afterwards; the model itself stays as usable as before."""
        self.cache.keys.clear()
        self.cache.values.clear()
        if self.features is not None:
            self.features.close()

    def build_batch(self, plan: list[ScheduledSequence]) -> ForwardBatch:
        return ForwardBatch.build(plan, self.spec.block_size, self.device, self.cache.keys[0].dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Computes the batch and stores its KV.

        Returns:
            Logits, float32 ``[num_rows, vocab_size]``, of ``batch.logit_rows``.
        """
        for slot in self._slots:
            slot.batch = batch
        kwargs = {"logits_to_keep": batch.logit_rows} if self._selects_rows else {}
        try:
            output = self.loaded.model(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **kwargs
            )
        finally:
            for slot in self._slots:
                slot.batch = None
        logits: torch.Tensor = output.logits[0]
        if not self._selects_rows:
            logits = logits[batch.logit_rows]
        return logits.float()

    def keep_accepted(self, batch: ForwardBatch, nodes_of: Mapping[str, Sequence[int]]) -> None:
        """Moves the KV of accepted tree nodes to where their tokens come to stand in the sequence.

        Args:
            nodes_of: by request id, the accepted path through the sequence's draft.
        """
        sources: list[int] = []
        targets: list[int] = []
        size = self.spec.block_size
        for sequence in batch.sequences:
            request = sequence.request
            base = request.num_computed_tokens + sequence.num_tokens
            for place, node in enumerate(nodes_of.get(request.request_id, ())):
                if node != place:
                    sources.append(slot_of(request.block_ids, base + node, size))
                    targets.append(slot_of(request.block_ids, base + place, size))
        if sources:
            self.cache.move(
                torch.tensor(sources, dtype=torch.int64).to(self.device),
                torch.tensor(targets, dtype=torch.int64).to(self.device),
            )

    def self_check(self) -> None:
        """Compares chunked, paged logits with those of the model's own attention over a short input.

        Catches whatever else a layer may remember between steps. Costs two short forwards.

        Raises:
            UnsupportedModelError: they differ by more than rounding explains.
        """
        length = sum(_CHECK_CHUNKS)
        token_ids = [(37 * index + 11) % min(self.loaded.vocab_size, 1000) for index in range(length)]
        try:
            paged = self._chunked_logits(token_ids)
            expected = self._reference_logits(token_ids)
        except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as failure:
            raise UnsupportedModelError(
                f"{type(self.loaded.model).__name__} fails over the paged cache: {type(failure).__name__}: {failure}"
            ) from failure
        error = float((paged - expected).norm() / expected.norm().clamp_min(1e-9))
        if not error <= _CHECK_TOLERANCE[self.loaded.dtype_name]:
            raise UnsupportedModelError(
                f"{type(self.loaded.model).__name__} gives other logits over the paged cache than by itself "
                f"(relative error {error:.2g}). Some of its layers keep state besides keys and values, or attend "
                "in a way that baton does not know. Set engine.self_check: false to serve it all the same."
            )

    def _chunked_logits(self, token_ids: list[int]) -> torch.Tensor:
        blocks = BlockManager(self.cache.num_blocks, self.spec.block_size, prefix_caching=False)
        request = Request("self-check", token_ids, SamplingParams())
        blocks.grow(request, len(token_ids))
        for chunk in _CHECK_CHUNKS:
            batch = self.build_batch([ScheduledSequence(request, chunk)])
            logits = self.forward(batch)
            request.num_computed_tokens += chunk
        return logits[-1]

    @torch.inference_mode()
    def _reference_logits(self, token_ids: list[int]) -> torch.Tensor:
        model = self.loaded.model
        model.set_attn_implementation("eager")
        try:
            ids = torch.tensor([token_ids], device=self.device)
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        finally:
            model.set_attn_implementation(ATTENTION_NAME)
        return logits
