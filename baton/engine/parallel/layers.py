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
from transformers import PreTrainedModel

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

    @property
    def num_columns(self) -> int:
        return sum(self._widths)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self.inner(states), self._widths)

    def whole(self) -> nn.Linear:
        """The layer as a whole. All ranks call this together."""
        inner: nn.Linear = self.inner  # type: ignore[assignment]
        weight = self._group.gather(inner.weight, self._widths, 0)
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=inner.bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if inner.bias is not None:
            layer.bias = nn.Parameter(self._group.gather(inner.bias, self._widths, 0), requires_grad=False)
        return layer


class SplitEmbedding(ParallelLayer):
    """An embedding of which each rank holds some tokens.

    Args:
        counts: number of tokens of each rank. The weight has one more row, of zeros, for tokens of other ranks.
    """

    def __init__(self, inner: nn.Module, group: RankGroup, counts: Sequence[int]) -> None:
        super().__init__(inner, group)
        self._counts = tuple(counts)
        self._first, self._count = sum(counts[: group.rank]), counts[group.rank]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = token_ids - self._first
        rows = torch.where((rows >= 0) & (rows < self._count), rows, self._count)
        return self._group.all_reduce(self.inner(rows))

    def whole_weight(self) -> torch.Tensor:
        """The rows of all tokens. All ranks call this together."""
        weight: torch.Tensor = self.inner.weight  # type: ignore[assignment]
        return self._group.gather(weight[: self._count], self._counts, 0)


class SharedInput(ParallelLayer):
    """Divides the input by the number of ranks, for a layer inside of a :class:`SummedLayer` that all ranks hold."""

    def forward(self, states: torch.Tensor, *args: Any) -> torch.Tensor:
        output: torch.Tensor = self.inner(states / self._group.size, *args)
        return output


def whole_embedding(model: PreTrainedModel) -> torch.Tensor:
    """A model's embedding, ``[vocab_size, hidden_size]``. All ranks of a divided model call this together."""
    layer: Any = model.get_input_embeddings()
    weight: torch.Tensor = layer.whole_weight() if isinstance(layer, SplitEmbedding) else layer.weight
    return weight


def whole_head(model: PreTrainedModel) -> nn.Module:
    """A model's language model head. All ranks of a divided model call this together."""
    layer: Any = model.get_output_embeddings()
    module: nn.Module = layer.whole() if isinstance(layer, GatheredLayer) else layer
    return module


def head_size(model: PreTrainedModel) -> int | None:
    """Number of tokens that a model's language model head tells apart; ``None`` without a head."""
    layer: Any = model.get_output_embeddings()
    if layer is None:
        return None
    return layer.num_columns if isinstance(layer, GatheredLayer) else int(layer.weight.shape[0])
