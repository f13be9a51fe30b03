"""EAGLE-3 heads as a compiled program: the decoder's, for one layer that reads a hidden state beside each token.

Without a matrix unit, its linear layers except keys and values are int8: each pass reads half as much, and a guess need
not be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from baton.core.errors import NotFusableError
from baton.engine.batch.attention_groups import Span
from baton.engine.batch.hidden_states import FINAL_HIDDEN
from baton.engine.cpu.decoder import feature_columns
from baton.engine.cpu.forward import FusedForward
from baton.engine.cpu.quantization import quantize
from baton.engine.cpu.structure import (
    Decoder,
    DecoderLayer,
    check_shapes,
    linear_of,
    norm_of,
    tensor_of,
)
from baton.engine.cpu.tiles import has_tiles
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.kv_cache.paged_cache import PagedKVCache, slot_of


class FusedHeadPass:
    """Implements ``HeadPass``; fusing the target's features stays with the head itself.

    Args:
        cache: has the head's layer after the model's; it must outlive all passes.
        layer: index of the head's layer in the cache.
        weights: ``int8``, or ``native`` for those of the head itself; ``auto`` is native where the CPU has a matrix
            unit for them, which computes many rows in the time of one, else int8.

    Raises:
        NotFusableError: the program does not support a part of the head, or it cannot be compiled.
    """

    def __init__(self, head: EagleHead, cache: PagedKVCache, layer: int, weights: str = "auto") -> None:
        decoder = _read_head(head)
        self._dtype = decoder.embedding.dtype
        if weights == "auto":
            weights = "native" if has_tiles() and self._dtype == torch.bfloat16 else "int8"
        if weights != "native":
            # Keys and values stay native, so that the cache is the same whether this pass or the head's modules wrote
            # it.
            (own,) = decoder.layers
            decoder = quantize(decoder, weights)
            decoder = replace(decoder, layers=(replace(decoder.layers[0], k=own.k, v=own.v),))
        if cache.keys[layer].dtype != self._dtype:
            raise NotFusableError(f"the head computes in {self._dtype}, but its cache holds {cache.keys[layer].dtype}")
        self._block_size = cache.spec.block_size
        fed = FINAL_HIDDEN if head.settings.norm_output else 1
        self._forward = FusedForward(
            decoder, [cache.keys[layer]], [cache.values[layer]], self._block_size, feature_columns([fed], 1)
        )

    def run(
        self, spans: Sequence[Span], token_ids: Sequence[int], hidden: torch.Tensor, *, only_last: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        for span in spans:
            positions += span.positions()
            slots += [slot_of(span.block_ids, place, self._block_size) for place in range(span.start, span.end)]
            last.append(len(positions) - 1)
        wanted = last if only_last else range(len(positions))
        numbers = torch.from_numpy(np.array((token_ids, positions, slots), dtype=np.int64))
        rows = torch.from_numpy(np.array(wanted, dtype=np.int64))
        logits, fed = self._forward.run(
            numbers[0], numbers[1], numbers[2], list(spans), rows, hidden.to(self._dtype).contiguous()
        )
        return (fed[rows] if len(wanted) < len(positions) else fed), logits


def _read_head(head: EagleHead) -> Decoder:
    settings, layers = head.settings, head.settings.layers
    if settings.version != 3 or layers.num_layers != 1:
        raise NotFusableError(
            f"the head is not an EAGLE-3 head of one layer (version {settings.version}, {layers.num_layers} layers)"
        )
    if layers.windows != (None,):
        raise NotFusableError("the head attends through a sliding window")
    if layers.hidden_act != "silu":
        raise NotFusableError(f"the head's activation is {layers.hidden_act}")
    layer: Any = head.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    norms = (attention.q_norm, attention.k_norm) if layers.qk_norm else None
    fused = DecoderLayer(
        input_norm=norm_of(layer.input_layernorm),
        q=linear_of(attention.q_proj, "q_proj"),
        k=linear_of(attention.k_proj, "k_proj"),
        v=linear_of(attention.v_proj, "v_proj"),
        o=linear_of(attention.o_proj, "o_proj"),
        q_norm=norm_of(norms[0]) if norms else None,
        k_norm=norm_of(norms[1]) if norms else None,
        post_norm=norm_of(layer.post_attention_layernorm),
        gate=linear_of(mlp.gate_proj, "gate_proj"),
        up=linear_of(mlp.up_proj, "up_proj"),
        down=linear_of(mlp.down_proj, "down_proj"),
        scaling=float(attention.variant.scaling),
        hidden_norm=norm_of(layer.hidden_norm),
    )
    decoder = Decoder(
        embedding=tensor_of(head.embedding, "embedding"),
        layers=(fused,),
        final_norm=norm_of(head.norm),
        lm_head=linear_of(head.vocabulary_head, "lm_head"),
        rotary=head.angles,
        num_heads=layers.num_heads,
        num_kv_heads=layers.num_kv_heads,
        head_dim=layers.head_dim,
        intermediate_size=layers.intermediate_size,
        normed_residual=settings.norm_before_residual,
    )
    check_shapes(decoder)
    return decoder
