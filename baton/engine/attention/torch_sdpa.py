"""Paged attention in plain torch: gathers the keys of a group of sequences, then one scaled-dot-product call.

Runs everywhere. The query heads that share a KV head become further query rows, so grouped-query attention repeats no
key and no value.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from baton.engine.attention.base import AttentionBatch, AttentionVariant
from baton.engine.batch.attention_groups import AttentionGroup
from baton.engine.kv_cache.paged_cache import PagedKVCache


class TorchSDPA:
    """Implements :class:`baton.engine.attention.base.AttentionBackend`."""

    key_sharing = None

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        self._cache.write(layer, batch.slots, key, value)
        outputs = [self._attend(layer, query[g.token_start : g.token_end], g, variant) for g in batch.groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(
        self, layer: int, query: torch.Tensor, group: AttentionGroup, variant: AttentionVariant
    ) -> torch.Tensor:
        view = group.view(variant.sliding_window)
        # [seqs, kv_heads, keys, dim]
        keys, values = (
            rows.view(group.num_seqs, view.num_keys, *rows.shape[1:]).transpose(1, 2)
            for rows in self._cache.read(layer, view.slots)
        )
        if variant.has_latents:
            keys = torch.cat((keys, values), dim=-1)
        num_kv_heads, num_heads = keys.shape[1], query.shape[1]
        share = num_heads // num_kv_heads
        # [seqs * queries, heads, dim] → [seqs, kv_heads, share * queries, dim]
        rows = query.reshape(group.num_seqs, group.num_queries, num_kv_heads, share, -1).permute(0, 2, 3, 1, 4)
        rows = rows.reshape(group.num_seqs, num_kv_heads, share * group.num_queries, -1)
        mask = view.mask
        if mask is not None and group.num_queries > 1:
            mask = mask.repeat(1, 1, share, 1)
        if variant.softcap is None and variant.sinks is None:
            output = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=variant.scaling)
        else:
            output = _attend_in_full(rows, keys, values, mask, group.num_queries, variant)
        output = output.reshape(group.num_seqs, num_kv_heads, share, group.num_queries, -1).permute(0, 3, 1, 2, 4)
        return output.reshape(group.num_seqs * group.num_queries, num_heads, -1)


def _attend_in_full(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    num_queries: int,
    variant: AttentionVariant,
) -> torch.Tensor:
    """Computes what the fused call cannot: capped scores (Gemma 2) and attention sinks (gpt-oss)."""
    scores = (query @ keys.transpose(-1, -2)) * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    if mask is not None:
        scores = scores + mask
    if variant.sinks is None:
        return torch.softmax(scores.float(), dim=-1).to(query.dtype) @ values
    num_kv_heads = keys.shape[1]
    sinks = variant.sinks.view(1, num_kv_heads, -1, 1).repeat_interleave(num_queries, dim=2)
    scores = torch.cat([scores, sinks.to(scores.dtype).expand(scores.shape[0], -1, -1, -1)], dim=-1)
    probs = torch.softmax(scores.float(), dim=-1)[..., :-1].to(query.dtype)
    return probs @ values
