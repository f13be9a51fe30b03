"""Rows of several sequences for one pass of a draft network, and their attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.attention.base import AttentionBackend, AttentionVariant
from baton.engine.batch.attention_groups import AttentionGroup, Span, group_spans
from baton.engine.device.uploads import upload, upload_ints
from baton.engine.kv_cache.paged_cache import slot_array


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of a pass, one sequence after the other.

    Attributes:
        positions, slots: int64 ``[num_rows]``.
        last: index of each sequence's last row.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    groups: list[AttentionGroup]
    last: list[int]

    @classmethod
    def build(cls, spans: Sequence[Span], block_size: int, device: torch.device, mask_dtype: torch.dtype) -> DraftRows:
        positions: list[int] = []
        last: list[int] = []
        for span in spans:
            positions += span.positions()
            last.append(len(positions) - 1)
        return cls(
            positions=upload_ints(positions, device),
            slots=upload(np.concatenate([slot_array(s.block_ids, s.start, s.end, block_size) for s in spans]), device),
            groups=group_spans(spans, block_size, device, mask_dtype),
            last=last,
        )


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """Attention of a draft's layers over the cached tokens of the sequences of ``rows``.

    Attributes:
        first_layer: index of the draft's first layer in the cache.
    """

    backend: AttentionBackend
    rows: DraftRows
    first_layer: int

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        return self.backend.forward(self.first_layer + layer, query, key, value, self.rows, variant)
