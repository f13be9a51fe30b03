"""A paged cache that is NaN wherever attention must not read, and the exact attention over it in float64.

The reference is dense and independent of the code under test: for each token it walks up the tree to find the visible
keys. It also bounds the error of each number, so that a check fails on a wrong key and passes on rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from baton.core.drafts import ROOT
from baton.core.kv_spec import SCALE_BYTES, KVCacheSpec, KVEncoding, LayerSpec
from baton.engine.attention.base import AttentionBackend, AttentionVariant
from baton.engine.batch.attention_groups import AttentionGroup, Span, group_spans
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache.kv_int8 import scales_of_rows
from baton.engine.kv_cache.paged_cache import PagedKVCache, slots_of

CPU = torch.device("cpu")
_FLOAT32_ROUNDOFF = 2.0**-24
_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_SMALLEST = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-24}
"""The smallest positive number of dtypes in which softmax weights can underflow; weights are at most 1 before the
division."""
_LIKELY = 6.0
"""Sums of n rounding errors stay below this times sqrt(n) units (Higham and Mary, "A new approach to probabilistic
rounding error analysis", 2019), with a probability of failure of about 1e-8 for each sum."""
_FEW = 16
"""Units of float32 rounding for exponentials, their arguments and the division, independent of the length."""
_SAFETY = 2.0


@dataclass
class Batch:
    """Implements :class:`baton.engine.attention.base.AttentionBatch`."""

    slots: torch.Tensor
    groups: list[AttentionGroup]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of heads and cache. ``share`` query heads use each KV head; with latents, queries multiply values too."""

    num_kv_heads: int = 2
    share: int = 2
    key_dim: int = 8
    value_dim: int = 8
    block_size: int = 4
    dtype: str = "float32"
    encoding: KVEncoding = KVEncoding.NATIVE
    has_latents: bool = False

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.value_dim * self.has_latents


@dataclass(frozen=True, slots=True)
class Exact:
    """The exact result of attention.

    Attributes:
        output: float64 ``[num_tokens, num_heads, value_dim]``.
        bound: the largest error that rounding explains, of the same shape.
    """

    output: torch.Tensor
    bound: torch.Tensor


@dataclass(slots=True)
class World:
    """Spans over a cache, and random queries, keys and values of their new tokens.

    Attributes:
        window: keys outside this sliding window of all tokens are NaN too; ``None`` means no window.
        num_blocks: size of the cache without its scratch block.
    """

    shape: Shape
    spans: Sequence[Span]
    num_layers: int = 1
    device: torch.device = CPU
    seed: int = 0
    window: int | None = None
    num_blocks: int = 48
    cache: PagedKVCache = field(init=False)
    batch: Batch = field(init=False)
    query: torch.Tensor = field(init=False)
    key: torch.Tensor = field(init=False)
    value: torch.Tensor = field(init=False)
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        shape, spans = self.shape, self.spans
        dtype = TORCH_DTYPES[shape.dtype]
        self._generator = torch.Generator().manual_seed(self.seed)
        layer = LayerSpec(shape.num_kv_heads, shape.key_dim, shape.value_dim)
        layers = (layer,) * self.num_layers
        spec = KVCacheSpec("model", shape.dtype, shape.block_size, layers, encoding=shape.encoding)
        self.cache = PagedKVCache(spec, self.num_blocks, self.device, scratch=True)
        poison(self.cache)
        for index, span in product(range(self.num_layers), spans):
            old = slots_of(span.block_ids, first_visible(span, self.window), span.start, shape.block_size)
            sizes = ((len(old), shape.num_kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
            self.cache.write(index, old.to(self.device), *(self.random(*size) for size in sizes))
        slots = [slots_of(span.block_ids, span.start, span.end, shape.block_size) for span in spans]
        groups = group_spans(spans, shape.block_size, self.device, dtype)
        self.batch = Batch(torch.cat(slots).to(self.device), groups)
        # Transposed views of [heads, tokens, dim], as transformers passes them.
        num_tokens, num_kv_heads = self.num_tokens, shape.num_kv_heads
        self.query = self.random(num_kv_heads * shape.share, num_tokens, shape.query_dim).transpose(0, 1)
        self.key = self.random(num_kv_heads, num_tokens, shape.key_dim).transpose(0, 1)
        self.value = self.random(num_kv_heads, num_tokens, shape.value_dim).transpose(0, 1)

    @property
    def num_tokens(self) -> int:
        """The number of new tokens of all spans."""
        return sum(span.num_tokens for span in self.spans)

    def random(self, *size: int) -> torch.Tensor:
        """Normally distributed numbers in the cache's dtype, the same on every device."""
        numbers = torch.randn(size, generator=self._generator).to(TORCH_DTYPES[self.shape.dtype])
        return numbers.to(self.device)

    def run(self, backend: AttentionBackend, variant: AttentionVariant, layer: int = 0) -> torch.Tensor:
        """The backend's output, ``[num_tokens, num_heads, value_dim]``."""
        return backend.forward(layer, self.query, self.key, self.value, self.batch, variant)

    def expected(self, variant: AttentionVariant, layer: int = 0) -> torch.Tensor:
        """The output of :meth:`exact`."""
        return self.exact(variant, layer).output

    def exact(self, variant: AttentionVariant, layer: int = 0) -> Exact:
        """The exact result, computed on the CPU. Call this after the new keys and values have been written."""
        queries = self.query.double().cpu()
        sinks = None if variant.sinks is None else variant.sinks.double().cpu()
        results: list[Exact] = []
        first = 0
        for span in self.spans:
            rows = queries[first : first + span.num_tokens].transpose(0, 1)
            results.append(self._exact_span(span, rows, variant, sinks, layer))
            first += span.num_tokens
        return Exact(torch.cat([each.output for each in results]), torch.cat([each.bound for each in results]))

    def _exact_span(
        self, span: Span, queries: torch.Tensor, variant: AttentionVariant, sinks: torch.Tensor | None, layer: int
    ) -> Exact:
        """The exact result of one span.

        Args:
            queries: ``[num_heads, num_tokens, query_dim]``
        """
        visible = torch.from_numpy(visible_keys(span, variant.sliding_window))
        slots = slots_of(span.block_ids, 0, span.end, self.shape.block_size)
        keys, values = (
            decoded(tensors[layer].index_select(0, slots.to(self.device)).cpu())
            .masked_fill(~visible.any(0)[:, None, None], 0.0)
            .transpose(0, 1)
            .repeat_interleave(self.shape.share, 0)
            for tensors in (self.cache.keys, self.cache.values)
        )
        if variant.has_latents:
            keys = torch.cat((keys, values), dim=-1)
        scores = queries @ keys.transpose(1, 2) * variant.scaling
        magnitudes = (queries.abs() @ keys.abs().transpose(1, 2) * abs(variant.scaling)).masked_fill(~visible, 0.0)
        if variant.softcap is not None:
            scores = variant.softcap * torch.tanh(scores / variant.softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        highest = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - highest)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[:, None, None] - highest)
        probs = weights / total
        output = probs @ values
        roundoff = _ROUNDOFF[self.shape.dtype]
        num_keys = visible.sum(-1)[None, :, None].double()
        score_error = (_LIKELY * self.shape.query_dim**0.5 + _FEW) * magnitudes.amax(-1, keepdim=True)
        score_error = _FLOAT32_ROUNDOFF * (score_error + _FEW * (variant.softcap or 0.0))
        mass = probs @ values.abs()
        spread = (probs.square() @ values.square()).sqrt()
        bound = _SAFETY * (
            roundoff * (torch.minimum(mass, _LIKELY * spread) + output.abs())
            + (2 * score_error + _FLOAT32_ROUNDOFF * (_LIKELY * num_keys.sqrt() + _FEW)) * mass
            + _SMALLEST[self.shape.dtype] * (visible.double() @ values.abs() / total + 1.0)
        )
        return Exact(output.transpose(0, 1), bound.transpose(0, 1))


def poison(cache: PagedKVCache) -> None:
    """Makes every key and value NaN, in every encoding of the cache."""
    for tensor in (*cache.keys, *cache.values):
        (scales_of_rows(tensor) if tensor.dtype == torch.int8 else tensor).fill_(torch.nan)


def decoded(rows: torch.Tensor) -> torch.Tensor:
    """The exact values of a cache's rows in float64."""
    if rows.dtype != torch.int8:
        return rows.double()
    return rows[..., :-SCALE_BYTES].double() * scales_of_rows(rows).double()[..., None]


def first_visible(span: Span, window: int | None) -> int:
    """The first position that any new token of a span may see."""
    if window is None:
        return span.first_key
    return min(span.start, max(span.first_key, min(span.start, span.tree_start) - window + 1))


def seen_from(span: Span, place: int, window: int | None) -> npt.NDArray[np.int64]:
    """The positions whose keys a token sees: itself, its ancestors in the tree, and all positions before the tree."""
    path: list[int] = []
    while span.parents and place >= span.tree_start:
        path.append(place)
        parent = span.parents[place - span.tree_start]
        place = span.tree_start + (parent if parent != ROOT else -1)
    before = np.arange(place, span.first_key - 1, -1)
    return np.concatenate((np.array(path, dtype=np.int64), before))[:window]


def visible_keys(span: Span, window: int | None) -> npt.NDArray[np.bool_]:
    """The mask of visible keys, ``[num_tokens, span.end]``."""
    visible = np.zeros((span.num_tokens, span.end), dtype=np.bool_)
    for row, place in enumerate(range(span.start, span.end)):
        visible[row, seen_from(span, place, window)] = True
    return visible
