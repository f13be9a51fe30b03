"""Paged attention by Triton kernels: no gathering, and one copy of batch metadata per batch instead of per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from baton.engine.attention.base import AttentionBatch, AttentionVariant
from baton.engine.attention.key_sharing import KeySharing
from baton.engine.attention.paged_plan import PagedPlan, PlannedBatch, Segment, make_plan
from baton.engine.attention.triton_kernels import attend, merge
from baton.engine.kv_cache.kv_int8 import scales_of_rows
from baton.engine.kv_cache.paged_cache import PagedKVCache

# Rows of a tile: the smallest that holds a sequence's queries with their heads, else the last. With these sizes and a
# native cache, compilers for sm_80 and sm_90 spill few registers; float32 is multiplied without tensor cores and needs
# more registers.
_TILE_ROWS = {2: (16, 32, 64), 4: (16,)}
_MIN_DIM = 16
"""Smallest side of a tensor-core product."""
_MIN_KEYS = 64
"""Keys that a program multiplies at a time. On an H200, a token attended to 1,024 keys in less than half the time with
pieces of 64 than with pieces of 256."""
_ROWS_PER_MERGE = 16
_PROGRAMS_PER_PROCESSOR = 4
_CPU_PROCESSORS = 2
_CPU_CAPABILITY = 9
_WARP_GROUP_ROWS = 64
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
        min_keys: see :class:`~.key_sharing.KeySharing`.
        num_programs: programs that keep the device busy; ``None`` derives it from the number of its processors.
        tile: tile of every launch, for measurements; ``None`` uses :func:`default_tile`.
        capability: major number of the compute capability that tiles are chosen for; ``None`` asks the device.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        min_keys: int = _MIN_KEYS,
        num_programs: int | None = None,
        tile: Tile | None = None,
        capability: int | None = None,
    ) -> None:
        self._cache = cache
        num_programs = num_programs or _PROGRAMS_PER_PROCESSOR * _num_processors(cache.device)
        self.key_sharing = KeySharing(min_keys, max(1, num_programs // cache.spec.layers[0].num_kv_heads))
        self._tile = tile
        self._capability = capability or _capability(cache.device)
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
            self._planned = (batch, make_plan(spans, self._cache.device, self.key_sharing))
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
        num_heads, value_dim = output.shape[1:]
        num_kv_heads, key_dim = keys.shape[1], query.shape[2] - value_dim * variant.has_latents
        has_int8 = keys.dtype == torch.int8
        key_scales, value_scales = (scales_of_rows(rows) if has_int8 else rows for rows in (keys, values))
        share = num_heads // num_kv_heads
        if variant.has_latents:
            share = next(each for each in range(min(share, _MIN_DIM), 0, -1) if share % each == 0)
            tile = self._tile or latent_tile(segment.max_tokens, share, query.element_size())
        else:
            tile = self._tile or default_tile(
                segment.max_tokens, share, key_dim, query.element_size(), has_int8, self._capability
            )
        head_groups = num_heads // num_kv_heads // share
        block_q = max(1, tile.rows // share)
        num_tiles = segment.num_rows // block_q + segment.num_pieces
        block_key, block_value = _padded(key_dim), _padded(value_dim)
        partial = stats = output
        if segment.is_divided:
            partial = query.new_empty(segment.num_rows, num_heads, value_dim, dtype=torch.float32)
            stats = query.new_empty(2, segment.num_rows, num_heads, dtype=torch.float32)
        sinks = output if variant.sinks is None else variant.sinks
        attend[(num_tiles, num_kv_heads * head_groups)](
            query,
            keys,
            values,
            key_scales,
            value_scales,
            output,
            partial,
            stats,
            sinks,
            plan.pieces,
            plan.sequences,
            plan.tables,
            plan.positions if plan.has_trees else plan.sequences,
            plan.nodes if plan.has_trees else plan.sequences,
            plan.ancestors if plan.has_trees else plan.sequences,
            segment.first_piece,
            segment.num_pieces,
            segment.first_row,
            segment.num_rows,
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
            head_groups=head_groups,
            key_dim=key_dim,
            value_dim=value_dim,
            block_size=self._cache.spec.block_size,
            window=variant.sliding_window or 0,
            has_softcap=variant.softcap is not None,
            has_sinks=variant.sinks is not None,
            has_trees=plan.has_trees,
            has_int8=has_int8,
            has_latents=variant.has_latents,
            is_divided=segment.is_divided,
            block_q=block_q,
            block_m=max(tile.rows, _power_of_two(block_q * share)),
            block_n=tile.keys,
            block_key=block_key,
            block_value=block_value,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if segment.is_divided:
            merge[(segment.num_tokens, num_heads)](
                output,
                partial,
                stats,
                sinks,
                plan.rows_of_tokens,
                first_token,
                segment.first_row,
                segment.num_rows,
                has_sinks=variant.sinks is not None,
                value_dim=value_dim,
                block_value=block_value,
                block_splits=_ROWS_PER_MERGE,
            )


def is_interpreted() -> bool:
    """Whether Triton's interpreter was switched on (TRITON_INTERPRET=1) when the kernels were loaded."""
    return not isinstance(attend, triton.JITFunction)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else _CPU_CAPABILITY


def default_tile(max_tokens: int, share: int, key_dim: int, item_size: int, has_int8: bool, capability: int) -> Tile:
    """The tile for sequences of at most ``max_tokens`` new tokens, ``share`` query heads to a KV head.

    Args:
        capability: major number of the device's compute capability.
    """
    sizes = _TILE_ROWS[item_size]
    rows = next((rows for rows in sizes if max_tokens * share <= rows), sizes[-1])
    block_m = max(rows, _power_of_two(max(1, rows // share) * share))
    block_key = _padded(key_dim)
    num_warps = 4 if block_m < _WARP_GROUP_ROWS or _four_warps_suffice(block_key, has_int8, capability) else 8
    return Tile(rows, _keys_per_step(block_key, item_size), num_warps)


def latent_tile(max_tokens: int, share: int, item_size: int) -> Tile:
    """The tile for latents, which are longer than keys and values: sums of a row alone take half a thousand registers.

    Args:
        share: query heads of a program.
    """
    rows = 16 if max_tokens * share <= 16 or item_size > 2 else 32
    return Tile(rows, 32 if item_size <= 2 else 16, 4 if rows == 16 else 8, num_stages=2)


def _four_warps_suffice(block_key: int, has_int8: bool, capability: int) -> bool:
    """Whether four warps compute a tile of 64 rows without running out of registers.

    Of eight warps, half repeat products of the others up to capability 9, which doubled the time of a prompt's
    attention on an H200. Where four warps spill registers, eight remain faster.
    """
    if capability == 9:
        return block_key <= 128 or not has_int8
    return capability != 10 and block_key <= 64


def _padded(dim: int) -> int:
    return max(_MIN_DIM, _power_of_two(dim))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def _keys_per_step(block_key: int, item_size: int) -> int:
    """Keys that a program multiplies at a time."""
    return 64 if block_key * item_size <= 256 else 32 if block_key * item_size <= 512 else 16
