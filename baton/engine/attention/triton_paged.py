"""Paged attention by Triton kernels: no gathering, and one copy of batch metadata per batch instead of per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from baton.engine.attention.base import AttentionBatch, AttentionVariant
from baton.engine.attention.paged_plan import PagedPlan, PlannedBatch, Segment, make_plan
from baton.engine.attention.triton_kernels import attend, merge
from baton.engine.kv_cache.kv_int8 import scales_of_rows
from baton.engine.kv_cache.paged_cache import PagedKVCache

# Rows of a tile: the smallest that holds a sequence's queries with their heads, else the last. With these sizes and a
# native cache, compilers for sm_80 and sm_90 spill no registers; float32 is multiplied without tensor cores and needs
# more registers.
_TILE_ROWS = {2: (16, 32, 64), 4: (16,)}
_MIN_DIM = 16
"""Smallest side of a tensor-core product."""
_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 32
_PROGRAMS_PER_PROCESSOR = 2
_CPU_PROCESSORS = 2
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tile:
    """Layout of a program of :func:`~.triton_kernels.attend`.

    Attributes:
        rows: queries times the heads that share a KV head; a power of two, at least 16.
        keys: keys that are multiplied at a time.
        num_warps: warps of a program.
        num_stages: pipeline stages, the loads in flight during a multiplication.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 3


class TritonPaged:
    """Implements :class:`baton.engine.attention.base.AttentionBackend` on CUDA, and on the CPU in Triton's interpreter.

    Args:
        keys_per_split: minimum number of keys for a program of its own.
        num_programs: programs that keep the device busy; ``None`` derives it from the number of its processors.
        tile: tile of every launch, for measurements; ``None`` uses :func:`default_tile`.
    """

    takes_plans = True

    def __init__(
        self,
        cache: PagedKVCache,
        keys_per_split: int = _KEYS_PER_SPLIT,
        num_programs: int | None = None,
        tile: Tile | None = None,
    ) -> None:
        self._cache = cache
        self._keys_per_split = keys_per_split
        self._num_programs = num_programs or _PROGRAMS_PER_PROCESSOR * _num_processors(cache.device)
        self._tile = tile
        self._planned: tuple[AttentionBatch, PagedPlan] | None = None

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
        if query.stride(-1) != 1:
            query = query.contiguous()
        plan = self._plan_of(batch)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        first_token = 0
        for segment in plan.segments:
            self._attend(plan, segment, first_token, query, keys, values, output, variant)
            first_token += segment.num_tokens
        return output

    def _plan_of(self, batch: AttentionBatch) -> PagedPlan:
        """Returns the plan, made at a batch's first layer; batches alternate, but never within a forward."""
        if isinstance(batch, PlannedBatch):
            return batch.plan
        if self._planned is None or self._planned[0] is not batch:
            spans = [span for group in batch.groups for span in group.spans]
            self._planned = (batch, make_plan(spans, self._cache.device))
        return self._planned[1]

    def _attend(
        self,
        plan: PagedPlan,
        segment: Segment,
        first_token: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        variant: AttentionVariant,
    ) -> None:
        num_tokens, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = values.shape[1], output.shape[-1]
        has_int8 = keys.dtype == torch.int8
        key_scales, value_scales = (scales_of_rows(rows) if has_int8 else rows for rows in (keys, values))
        share = num_heads // num_kv_heads
        tile = self._tile or default_tile(segment.max_tokens, share, key_dim, query.element_size())
        block_q = max(1, tile.rows // share)
        num_tiles = segment.num_tokens // block_q + segment.num_seqs
        block_key, block_value = _padded(key_dim), _padded(value_dim)
        splits = self._num_splits(segment, block_q, num_kv_heads, variant.sliding_window)
        target = stats = output
        if splits > 1:
            target = query.new_empty(splits, num_tokens, num_heads, value_dim, dtype=torch.float32)
            stats = query.new_empty(2, splits, num_tokens, num_heads, dtype=torch.float32)
        sinks = output if variant.sinks is None else variant.sinks
        attend[(num_tiles, num_kv_heads, splits)](
            query,
            keys,
            values,
            key_scales,
            value_scales,
            target,
            stats,
            sinks,
            plan.sequences,
            plan.tables,
            plan.positions if plan.has_trees else plan.sequences,
            plan.nodes if plan.has_trees else plan.sequences,
            plan.ancestors if plan.has_trees else plan.sequences,
            segment.first,
            segment.num_seqs,
            num_tokens,
            plan.tables.shape[1],
            plan.nodes.shape[1],
            plan.ancestors.shape[1],
            variant.scaling * (_LOG2_E if variant.softcap is None else 1.0),
            variant.softcap or 1.0,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            key_scales.stride(0),
            key_scales.stride(1),
            value_scales.stride(0),
            value_scales.stride(1),
            share=share,
            key_dim=key_dim,
            value_dim=value_dim,
            block_size=self._cache.spec.block_size,
            window=variant.sliding_window or 0,
            has_softcap=variant.softcap is not None,
            has_sinks=variant.sinks is not None,
            has_trees=plan.has_trees,
            has_int8=has_int8,
            is_split=splits > 1,
            block_q=block_q,
            block_m=max(tile.rows, _power_of_two(block_q * share)),
            block_n=tile.keys,
            block_key=block_key,
            block_value=block_value,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if splits > 1:
            merge[(segment.num_tokens, num_heads)](
                output,
                target,
                stats,
                sinks,
                first_token,
                num_tokens,
                has_sinks=variant.sinks is not None,
                splits=splits,
                value_dim=value_dim,
                block_value=block_value,
            )

    def _num_splits(self, segment: Segment, block_q: int, num_kv_heads: int, window: int | None) -> int:
        """A power of two: enough programs for the whole device, but not too few keys for each."""
        num_keys = segment.max_keys if window is None else min(segment.max_keys, window + segment.max_tokens)
        num_tiles = max(segment.num_seqs, segment.num_tokens // block_q)
        wanted = min(num_keys // self._keys_per_split, self._num_programs // (num_tiles * num_kv_heads), _MAX_SPLITS)
        return 1 << (max(1, wanted).bit_length() - 1)


def is_interpreted() -> bool:
    """Whether Triton's interpreter was switched on (TRITON_INTERPRET=1) when the kernels were loaded."""
    return not isinstance(attend, triton.JITFunction)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def default_tile(max_tokens: int, share: int, key_dim: int, item_size: int) -> Tile:
    """The tile for sequences of at most ``max_tokens`` new tokens, ``share`` query heads to a KV head."""
    sizes = _TILE_ROWS[item_size]
    rows = next((rows for rows in sizes if max_tokens * share <= rows), sizes[-1])
    block_m = max(rows, _power_of_two(max(1, rows // share) * share))
    return Tile(rows, _keys_per_step(_padded(key_dim), item_size), num_warps=8 if block_m >= 64 else 4)


def _padded(dim: int) -> int:
    return max(_MIN_DIM, _power_of_two(dim))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def _keys_per_step(block_key: int, item_size: int) -> int:
    """Keys that a program multiplies at a time."""
    return 64 if block_key * item_size <= 256 else 32 if block_key * item_size <= 512 else 16
