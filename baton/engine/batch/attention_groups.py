"""Groups the sequences of a batch for attention: adjacent ones of one shape share one call and one mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from baton.core.drafts import ROOT, depths_of
from baton.engine.device.uploads import upload
from baton.engine.kv_cache.paged_cache import slots_of

# Sequences share one padded gather while the shortest context is at least this part of the longest.
_MAX_PADDING_RATIO = 2


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence, after those that its blocks hold already.

    Attributes:
        start: place of the first new token in the sequence's slots.
        num_tokens: new tokens.
        parents: parents in the tree of tokens that fills the last ``len(parents)`` places, see ``Draft``; empty when
            every token follows the one before it. Part of the tree may be older than ``start``.
        first_key: place of the first key that may be attended to.
    """

    block_ids: Sequence[int]
    start: int
    num_tokens: int
    parents: Sequence[int] = ()
    first_key: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def tree_start(self) -> int:
        return self.end - len(self.parents)

    def positions(self) -> list[int]:
        """Position of each new token. In a tree it depends on the depth, not on the place."""
        if not self.parents:
            return list(range(self.start, self.end))
        return [*range(self.start, self.tree_start), *self.node_positions()[max(0, self.start - self.tree_start) :]]

    def node_positions(self) -> list[int]:
        """Position of each token of the tree."""
        return [self.tree_start + depth for depth in depths_of(self.parents)]

    def hidden_tree_keys(self) -> torch.Tensor:
        """bool ``[num_tokens, len(parents)]``: which nodes are neither an ancestor of a new token nor itself."""
        size = len(self.parents)
        related = np.eye(size, dtype=np.bool_)  # numpy, whose small operations cost a third of torch's
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                related[node] |= related[parent]
        outside = np.zeros((max(0, self.tree_start - self.start), size), dtype=np.bool_)
        return torch.from_numpy(~np.concatenate((outside, related[max(0, self.start - self.tree_start) :])))


@dataclass(frozen=True, slots=True)
class KVView:
    """The cached positions that a group of sequences attends to.

    Attributes:
        slots: int64 ``[num_seqs * num_keys]``, each sequence padded with one of its own.
        num_keys: padded number of positions per sequence.
        mask: additive, ``[num_seqs, 1, num_queries, num_keys]``; ``None`` when everything is visible.
    """

    slots: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class AttentionGroup:
    """Adjacent sequences with the same number of new tokens, attended in one call.

    Attributes:
        token_start: index of the group's first token in the batch.
        num_queries: new tokens of each sequence.
    """

    token_start: int
    num_queries: int
    spans: list[Span]
    block_size: int
    device: torch.device
    mask_dtype: torch.dtype
    _views: dict[int | None, KVView] = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        return len(self.spans)

    @property
    def token_end(self) -> int:
        return self.token_start + self.num_seqs * self.num_queries

    def view(self, sliding_window: int | None) -> KVView:
        """The group's keys under a window; built once per step and window, shared by all layers with that window."""
        if sliding_window not in self._views:
            self._views[sliding_window] = self._build_view(sliding_window)
        return self._views[sliding_window]

    def _build_view(self, window: int | None) -> KVView:
        queries = torch.tensor([span.positions() for span in self.spans])
        firsts = [
            max(span.first_key, 0 if window is None else first - window + 1)
            for span, first in zip(self.spans, queries.min(dim=1).values.tolist(), strict=True)
        ]
        num_keys = max(span.end - first for span, first in zip(self.spans, firsts, strict=True))
        slots = torch.empty(self.num_seqs, num_keys, dtype=torch.int64)
        for row, (span, first) in enumerate(zip(self.spans, firsts, strict=True)):
            own = slots_of(span.block_ids, first, span.end, self.block_size)
            slots[row, : span.end - first] = own
            # Padding repeats a position of the same sequence: a masked NaN still spoils the sum, so it must not come
            # from another sequence.
            slots[row, span.end - first :] = own[-1]
        keys = torch.tensor(firsts)[:, None] + torch.arange(num_keys)
        trees = [
            (row, span, first) for row, (span, first) in enumerate(zip(self.spans, firsts, strict=True)) if span.parents
        ]
        for row, span, first in trees:
            begin, skipped = max(0, span.tree_start - first), max(0, first - span.tree_start)
            keys[row, begin : span.end - first] = torch.tensor(span.node_positions()[skipped:])
        visible = keys[:, None, :] <= queries[:, :, None]
        if window is not None:
            visible &= keys[:, None, :] > queries[:, :, None] - window
        for row, span, first in trees:
            begin, skipped = max(0, span.tree_start - first), max(0, first - span.tree_start)
            visible[row, :, begin : span.end - first] &= ~span.hidden_tree_keys()[:, skipped:]
            visible[row, :, span.end - first :] = False
        mask = None
        if not bool(visible.all()):
            hidden = upload((~visible[:, None]).numpy(), self.device)
            mask = torch.zeros(hidden.shape, dtype=self.mask_dtype, device=self.device)
            mask.masked_fill_(hidden, float("-inf"))
        return KVView(upload(slots.flatten().numpy(), self.device), num_keys, mask)


def group_spans(
    spans: Sequence[Span], block_size: int, device: torch.device, mask_dtype: torch.dtype
) -> list[AttentionGroup]:
    """Groups adjacent spans. Sorted by number of tokens, then by falling length, they form the fewest groups."""
    groups: list[AttentionGroup] = []
    token_start = 0
    for span in spans:
        last = groups[-1] if groups else None
        if (
            last is None
            or last.num_queries != span.num_tokens
            or span.end * _MAX_PADDING_RATIO < last.spans[0].end  # lengths fall within a group
        ):
            last = AttentionGroup(token_start, span.num_tokens, [], block_size, device, mask_dtype)
            groups.append(last)
        last.spans.append(span)
        token_start += span.num_tokens
    return groups
