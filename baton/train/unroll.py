"""Training-time test: the head drafts several consecutive tokens from every position at once (arXiv 2503.01840, 3.2).

keys that row 2 sees at step 2     true rows   0 1 2         like a prefix in the cache
                                   own rows    2' 2''        of steps 1 and 2 at the same row: its own draft so far
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from baton.engine.attention.base import AttentionVariant
from baton.engine.draft.eagle.head import EagleHead
from baton.train.batches import RowBatch

ChooseTokens = Callable[[int, torch.Tensor], torch.Tensor]


class UnrolledAttend:
    """Attention of successive steps over the same rows; an :class:`baton.engine.draft.layers.Attend`.

    Args:
        context: keys and values of the context rows, each ``[num_context, num_kv_heads, head_dim]``.
        context_counts: number of context rows of each sample.
        counts: number of predicting rows of each sample.
    """

    def __init__(
        self, context: tuple[torch.Tensor, torch.Tensor], context_counts: tuple[int, ...], counts: tuple[int, ...]
    ) -> None:
        self._context = [part.split_with_sizes(list(context_counts)) for part in context]
        self._counts = list(counts)
        self._prefix: list[list[torch.Tensor]] = []
        self._masks: list[torch.Tensor] = []
        self._own_keys: list[torch.Tensor] = []
        self._own_values: list[torch.Tensor] = []

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        if not self._prefix:
            self._begin(key, value)
        else:
            self._own_keys.append(key)
            self._own_values.append(value)
        num_rows, num_heads, dim = query.shape
        num_groups = num_heads // key.shape[1]
        # [num_kv_heads, queries of one key head, rows, dim]
        grouped = (query * variant.scaling).view(num_rows, -1, num_groups, dim).permute(1, 2, 0, 3)
        outputs = []
        start = 0
        for index, count in enumerate(self._counts):
            span = slice(start, start + count)
            outputs.append(self._of_sample(index, span, grouped[:, :, span]))
            start += count
        return torch.cat(outputs, dim=2).permute(2, 0, 1, 3).reshape(num_rows, num_heads, dim)

    def _begin(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the keys and values of the first step's rows, which are true rows that later steps attend to."""
        self._prefix = [
            [
                torch.cat(parts).transpose(0, 1)
                for parts in zip(context, part.split_with_sizes(self._counts), strict=True)
            ]
            for context, part in zip(self._context, (key, value), strict=True)
        ]
        for index, count in enumerate(self._counts):
            num_keys = self._prefix[0][index].shape[1]
            hidden = torch.ones(count, num_keys, dtype=torch.bool, device=key.device).triu(num_keys - count + 1)
            self._masks.append(torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -torch.inf))

    def _of_sample(self, index: int, span: slice, query: torch.Tensor) -> torch.Tensor:
        keys, values = self._prefix[0][index], self._prefix[1][index]
        num_kv_heads, num_groups, count, dim = query.shape
        flat = query.reshape(num_kv_heads, num_groups * count, dim)
        scores = (flat @ keys.transpose(1, 2)).view(num_kv_heads, num_groups, count, -1) + self._masks[index]
        if not self._own_keys:
            weights = scores.softmax(dim=-1).to(query.dtype)
            return (weights.flatten(1, 2) @ values).view(query.shape)
        # [num_own, rows, num_kv_heads, dim] -> [num_kv_heads, 1, rows, num_own, dim]
        own_keys = torch.stack([key[span] for key in self._own_keys]).permute(2, 1, 0, 3)[:, None]
        own_values = torch.stack([value[span] for value in self._own_values]).permute(2, 1, 0, 3)[:, None]
        own_scores = (query[:, :, :, None] * own_keys).sum(dim=-1, dtype=torch.float32)
        weights = torch.cat((scores, own_scores), dim=-1).softmax(dim=-1).to(query.dtype)
        num_keys = keys.shape[1]
        of_prefix = (weights[..., :num_keys].flatten(1, 2) @ values).view(query.shape)
        return of_prefix + (weights[..., num_keys:, None] * own_values).sum(dim=-2)


def unroll(
    head: EagleHead, batch: RowBatch, num_steps: int, choose: ChooseTokens | None = None
) -> Iterator[torch.Tensor]:
    """Yields the inputs of the head's lm_head step by step, each ``[num_rows, hidden_size]``.

    Args:
        choose: maps a step and the previous step's hidden states to the token of each row; ``None`` uses the answer's
            tokens.
    """
    features = torch.cat((batch.context_features, batch.features)).to(head.dtype)
    context_hidden, hidden = head.fuse(features).split_with_sizes([len(batch.context_features), batch.num_rows])
    context = head.keys_values(batch.context_token_ids, context_hidden, batch.context_positions)
    attend = UnrolledAttend(context, batch.context_counts, batch.counts)
    token_ids = batch.token_ids
    normed = hidden
    for step in range(num_steps):
        if step:
            token_ids = choose(step, normed) if choose else batch.token_ids[batch.shifted(step)]
        hidden, normed = head(token_ids, hidden, batch.positions + step, attend)
        yield normed
