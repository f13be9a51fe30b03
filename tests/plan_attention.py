"""An attention backend in plain torch that uses only a batch's plan, and so defines what a plan means."""

from __future__ import annotations

import torch

from baton.engine.attention.base import AttentionBatch, AttentionVariant
from baton.engine.attention.key_sharing import UNDIVIDED
from baton.engine.attention.paged_plan import PagedPlan, PlannedBatch, Segment, make_plan
from baton.engine.kv_cache.paged_cache import PagedKVCache
from tests.graph_tape import TapeRecorder


class PlanAttention:
    """Implements :class:`baton.engine.attention.base.AttentionBackend` without optimisation."""

    key_sharing = UNDIVIDED

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
        if isinstance(batch, PlannedBatch):
            plan = batch.plan
        else:
            plan = make_plan([span for group in batch.groups for span in group.spans], self._cache.device)
        output = torch.empty((*query.shape[:2], value.shape[-1]), dtype=query.dtype)
        output.fill_(torch.nan)
        for segment in plan.segments:
            self.attend(layer, query, output, plan, variant, segment)
        return output

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        output: torch.Tensor,
        plan: PagedPlan,
        variant: AttentionVariant,
        segment: Segment,
    ) -> None:
        """Computes the segment's rows of ``output`` (``[num_tokens, num_heads, value_dim]``), as a kernel does."""
        for piece in range(segment.first_piece, segment.first_piece + segment.num_pieces):
            self._attend(layer, piece, query, output, plan, variant)

    def _attend(
        self,
        layer: int,
        piece: int,
        query: torch.Tensor,
        output: torch.Tensor,
        plan: PagedPlan,
        variant: AttentionVariant,
    ) -> None:
        _, seq, split, splits = plan.pieces[piece].tolist()
        if split or not splits:
            return
        token, start, end, first_key, tree_start = plan.sequences[seq].tolist()
        behind = int(plan.sequences[seq + 1, 0])
        block_size = self._cache.spec.block_size
        places = torch.arange(first_key, end)
        slots = plan.tables[seq].long()[places // block_size] * block_size + places % block_size
        positions = torch.arange(start, start + behind - token)
        visible = places[None] <= positions[:, None]
        key_positions = places.clone()
        if plan.has_trees:
            positions = plan.positions[token:behind, 0].long()
            nodes = (places - tree_start).clamp_min(0)
            in_tree = places >= tree_start
            key_positions[in_tree] = plan.nodes[seq].long()[nodes[in_tree]]
            bits = plan.ancestors[token:behind][:, nodes // 32] >> (nodes % 32)[None] & 1
            visible = torch.where(in_tree[None], bits.bool(), places[None] <= positions[:, None])
        if variant.sliding_window is not None:
            visible &= key_positions[None] > positions[:, None] - variant.sliding_window
        keys, values = (tensor.float() for tensor in self._cache.read(layer, slots))
        if variant.has_latents:
            keys = torch.cat((keys, values), dim=-1)
        share = query.shape[1] // keys.shape[1]
        for head in range(query.shape[1]):
            scores = query[token:behind, head].float() @ keys[:, head // share].T * variant.scaling
            if variant.softcap is not None:
                scores = torch.tanh(scores / variant.softcap) * variant.softcap
            scores = scores.masked_fill(~visible, -torch.inf)
            if variant.sinks is not None:
                sink = variant.sinks[head].float().expand(len(scores), 1)
                probs = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[:, :-1]
            else:
                probs = torch.softmax(scores, dim=-1).nan_to_num()
            output[token:behind, head] = (probs @ values[:, head // share]).to(query.dtype)


class TapedPlanAttention(PlanAttention):
    """Records the attention of a piece on a tape as one kernel launch."""

    def __init__(self, cache: PagedKVCache, recorder: TapeRecorder) -> None:
        super().__init__(cache)
        self._attend = recorder.kernel("attend", self._attend)  # type: ignore[method-assign]
