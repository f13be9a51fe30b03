"""Compares the speed of attention by tile layout, and that of a batch with one long sequence with a uniform batch.

Heads are those of Llama-3.1-8B. On the CPU, Triton's interpreter computes a few tokens. A layout that does not compile
for the device gives a row that says so; a layout whose results differ from the default layout's fails the part.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.core.kv_spec import KVCacheSpec, LayerSpec
from baton.engine.attention.base import AttentionVariant
from baton.engine.attention.paged_plan import PlannedBatch, make_plan
from baton.engine.batch.attention_groups import Span
from baton.engine.device.device_errors import is_device_lost
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache.paged_cache import PagedKVCache, slots_of
from benchmarks.device_run.part import Row, Setting
from benchmarks.device_run.random_model import fill_randomly
from benchmarks.device_run.timing import graphed, median_ms

if TYPE_CHECKING:
    from baton.engine.attention.triton_paged import Tile, TritonPaged

_BLOCK_SIZE = 16
_BUDGET_S = 0.2
_MAX_ERROR_CHARS = 200
_TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's heads, and the dtype in which it computes."""

    num_heads: int
    num_kv_heads: int
    dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one launch, each with ``num_tokens`` new tokens.

    Attributes:
        contexts: number of tokens before the new ones, by sequence.
    """

    name: str
    num_tokens: int
    contexts: tuple[int, ...]


class Workload:
    """Random queries over a cache with random keys and values and shuffled blocks."""

    def __init__(self, heads: Heads, sequences: Sequences, device: torch.device) -> None:
        rng = np.random.default_rng(0)
        lengths = [context + sequences.num_tokens for context in sequences.contexts]
        counts = [-(-length // _BLOCK_SIZE) for length in lengths]
        layer = LayerSpec(heads.num_kv_heads, heads.dim, heads.dim)
        self.cache = PagedKVCache(KVCacheSpec("", heads.dtype, _BLOCK_SIZE, (layer,)), sum(counts), device)
        fill_randomly(self.cache)
        blocks = np.split(rng.permutation(sum(counts)), np.cumsum(counts)[:-1])
        spans = [
            Span(own.tolist(), context, sequences.num_tokens)
            for own, context in zip(blocks, sequences.contexts, strict=True)
        ]
        slots = torch.cat([slots_of(span.block_ids, span.start, span.end, _BLOCK_SIZE) for span in spans])
        self._spans, self._slots = spans, slots.to(device)
        num_tokens, dtype = len(slots), TORCH_DTYPES[heads.dtype]
        sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        self._tensors = [torch.randn(num_tokens, size, heads.dim, device=device, dtype=dtype) for size in sizes]
        self._variant = AttentionVariant(heads.dim**-0.5)
        pairs = sum(sequences.num_tokens * (span.start + (sequences.num_tokens + 1) / 2) for span in spans)
        self.flops = 4 * pairs * heads.num_heads * heads.dim
        self.num_bytes = 2 * sum(lengths) * heads.num_kv_heads * heads.dim * dtype.itemsize

    def attention_by(self, backend: TritonPaged) -> Callable[[], torch.Tensor]:
        """A function that writes the new keys and values with two small kernels, and attends."""
        plan = make_plan(self._spans, self.cache.device, backend.key_sharing)
        batch = PlannedBatch(self._slots, plan)
        query, key, value = self._tensors
        return lambda: backend.forward(0, query, key, value, batch, self._variant)


def run(setting: Setting) -> Iterator[Row]:
    """Yields a row for each layout of each workload, then one for each kind of batch."""
    if importlib.util.find_spec("triton") is None:
        yield {"name": "triton", "not_run": "triton is not installed"}
        return
    from baton.engine.attention.triton_paged import Tile

    tiny = setting.is_tiny
    heads = Heads(4, 2, 16, "float32") if tiny else Heads(32, 8, 128, "bfloat16")
    prefill = Sequences("prefill 8192", 8192, (0,))
    decode = Sequences("decode 64 x 1k", 1, (1024,) * 64)
    split = Sequences("decode 4 x 8k", 1, (8192,) * 4)
    skewed = Sequences("decode 1 x 32k + 63 x 1k", 1, (32768, *(1024,) * 63))
    uniform = Sequences("decode 64 x 1.5k", 1, ((32768 + 63 * 1024) // 64,) * 64)
    prefill_tiles = [Tile(64, 64, 8), Tile(64, 64, 4), Tile(128, 64, 8), Tile(128, 64, 8, 2), Tile(128, 128, 8)]
    decode_tiles = [Tile(16, 64, 4), Tile(16, 64, 2), Tile(16, 128, 4)]
    if tiny:
        prefill, decode = Sequences("prefill 40", 40, (0,)), Sequences("decode 2 x 40", 1, (40, 40))
        split, skewed, uniform = decode, Sequences("decode 1 x 60 + 1 x 10", 1, (60, 10)), decode
        prefill_tiles, decode_tiles = prefill_tiles[1:3], decode_tiles[:2]
    processors = 2
    if setting.device.type == "cuda":
        processors = torch.cuda.get_device_properties(setting.device).multi_processor_count
    programs = [2 * processors, 4 * processors]
    # The most informative comparisons come first, in case the time limit cuts the others off.
    yield from _compare(heads, prefill, prefill_tiles, programs[:1], setting.device)
    yield from _compare(heads, skewed, decode_tiles[:1], programs, setting.device)
    if not tiny:
        yield from _compare(heads, uniform, decode_tiles[:1], programs, setting.device)
        yield from _compare(heads, split, decode_tiles, programs, setting.device)
        yield from _compare(heads, decode, decode_tiles, programs[:1], setting.device)


def _compare(
    heads: Heads, sequences: Sequences, tiles: Sequence[Tile], programs: Sequence[int], device: torch.device
) -> Iterator[Row]:
    """Measures all tiles with all numbers of programs, and compares the outputs with those of the default layout."""
    from baton.engine.attention.triton_paged import TritonPaged

    workload = Workload(heads, sequences, device)
    try:
        expected = workload.attention_by(TritonPaged(workload.cache))().float()
    except Exception as error:
        if device.type == "cuda" or "InterpreterError" not in type(error).__name__:
            raise
        # Triton 3.6 interprets nothing with numpy 2.4 or newer.
        yield {"name": sequences.name, "not_run": f"Triton's interpreter fails here: {error}"}
        return
    for tile in tiles:
        for num_programs in programs:
            name = f"{sequences.name}: {tile.rows} x {tile.keys}, {tile.num_warps} warps, {tile.num_stages} stages"
            name += f", {num_programs} programs" if len(programs) > 1 else ""
            backend = TritonPaged(workload.cache, num_programs=num_programs, tile=tile)
            try:
                attend = workload.attention_by(backend)
                found = attend().float()
                ms = median_ms(graphed(attend, device), _BUDGET_S)
            except Exception as error:
                if is_device_lost(error):
                    raise
                why = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
                yield {"name": name, "note": why} if _is_too_large(error) else {"name": name, "ok": False, "error": why}
                continue
            distance = float((found - expected).norm() / expected.norm())
            wrong = {} if distance < _TOLERANCE[heads.dtype] else {"ok": False}
            yield {
                "name": name,
                **wrong,
                "ms": ms,
                "gb_per_s": workload.num_bytes / ms / 1e6,
                "tflop_per_s": workload.flops / ms / 1e9,
                "distance": distance,
            }


def _is_too_large(error: Exception) -> bool:
    """Whether a layout needs more registers or shared memory than the device has."""
    return "OutOfResources" in type(error).__name__ or "PassManager" in str(error)
