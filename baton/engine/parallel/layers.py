"""Layers of which each rank holds a part. They wrap the model's own layers, whose weights are plain tensors.

    columns of one layer, rows of the next         x ─▶ gate, up (half of the columns) ─▶ down (half of the rows) ─▶ Σ
    the same for attention: its heads              x ─▶ q, k, v (half of the heads) ───▶ o (half of the rows) ────▶ Σ

Only Σ exchanges anything: the ranks' sums are added (Shoeybi et al., "Megatron-LM", 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from baton.engine.parallel.group import RankGroup


class ParallelLayer(nn.Module):
    """Wraps a layer of the model. Attributes that it lacks are those of the wrapped layer."""

    def __init__(self, inner: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.inner = inner
        self._group = group

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class SummedLayer(ParallelLayer):
    """Adds the ranks' outputs: for layers with a part of the rows, and for experts with a part of each expert."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._group.all_reduce(self.inner(*args, **kwargs))


class SlicedLayer(SummedLayer):
    """Like :class:`SummedLayer`, for an input that every rank holds whole.

    Args:
        columns: columns of the input that belong to this rank.
    """

    def __init__(self, inner: nn.Module, group: RankGroup, columns: slice) -> None:
        super().__init__(inner, group)
        self._columns = columns

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states[..., self._columns])


class GatheredLayer(ParallelLayer):
    """Puts the ranks' columns side by side.

    Args:
        widths: number of columns of each rank.
    """

    def __init__(self, inner: nn.Module, group: RankGroup, widths: Sequence[int]) -> None:
        super().__init__(inner, group)
        self._widths = tuple(widths)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self._group.gather_columns(self.inner(states), self._widths)


class SplitEmbedding(ParallelLayer):
    """An embedding of which each rank holds some tokens.

    Args:
        first: the first token of this rank.
        count: the number of its tokens. The weight has one more row, of zeros, for all other tokens.
    """

    def __init__(self, inner: nn.Module, group: RankGroup, first: int, count: int) -> None:
        super().__init__(inner, group)
        self._first, self._count = first, count

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = token_ids - self._first
        rows = torch.where((rows >= 0) & (rows < self._count), rows, self._count)
        return self._group.all_reduce(self.inner(rows))


class SharedInput(ParallelLayer):
    """Divides the input by the number of ranks, for a layer inside of a :class:`SummedLayer` that all ranks hold."""

    def forward(self, states: torch.Tensor, *args: Any) -> torch.Tensor:
        output: torch.Tensor = self.inner(states / self._group.size, *args)
        return output
