"""Copies of KV from one cache to another during steps, and the rate of such copies: ``--only kv_copies``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from baton.core.kv_spec import KVCacheSpec, LayerSpec
from baton.engine.kv_cache.paged_cache import PagedKVCache
from benchmarks.device_run.copy_checks import check_interleavings
from benchmarks.device_run.part import Row, Setting

_BLOCK_SIZE = 16
_REPEATS = 5
_LLAMA_8B = KVCacheSpec("model", "bfloat16", _BLOCK_SIZE, (LayerSpec(8, 128, 128),) * 32)
_TINY = KVCacheSpec("model", "float32", _BLOCK_SIZE, (LayerSpec(2, 16, 16),) * 2)
_TOKENS = (16, 128, 1024)
_TINY_TOKENS = (16, 64)


def measure_rates(device: torch.device, is_tiny: bool) -> Iterator[Row]:
    """Measures the rates of parts of all layers, with scattered blocks as in a used cache."""
    spec, sizes = (_TINY, _TINY_TOKENS) if is_tiny else (_LLAMA_8B, _TOKENS)
    cache = PagedKVCache(spec, 2 * max(sizes) // _BLOCK_SIZE, device)
    layers = range(len(spec.layers))
    for num_tokens in sizes:
        blocks = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        num_bytes = num_tokens * spec.bytes_per_token
        pageable = memoryview(bytearray(num_bytes))
        staged = cache.staging(num_bytes)

        def bring(data: memoryview | torch.Tensor, blocks: list[int] = blocks, end: int = num_tokens) -> None:
            brought = cache.import_bytes(blocks, 0, end, layers, data)
            if brought is not None:
                cache.wait(brought)

        def fetch(into: memoryview | None, blocks: list[int] = blocks, end: int = num_tokens) -> None:
            cache.export_bytes(blocks, 0, end, layers, into)

        ways: dict[str, Callable[[], None]] = {
            "export to new memory": lambda fetch=fetch: fetch(None),  # type: ignore[misc]
            "export to pageable memory": lambda fetch=fetch, pageable=pageable: fetch(pageable),  # type: ignore[misc]
            "import from pageable memory": lambda bring=bring, pageable=pageable: bring(pageable),  # type: ignore[misc]
        }
        if staged is not None:
            ways["export to pinned memory"] = ways.pop("export to new memory")
            ways["import from pinned memory"] = lambda bring=bring, staged=staged: bring(staged)  # type: ignore[misc]
        for name, way in ways.items():
            seconds = statistics.median(_timed(way) for _ in range(_REPEATS))
            yield {"name": name, "mib": num_bytes / 2**20, "ms": seconds * 1e3, "gb_per_s": num_bytes / seconds / 1e9}


def _timed(way: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    way()
    return time.perf_counter() - started_s


NUM_INTERLEAVINGS = 30
_NUM_TINY = 4


def run(setting: Setting) -> Iterator[Row]:
    """Yields a row for each interleaving, then rates."""
    count = _NUM_TINY if setting.is_tiny else NUM_INTERLEAVINGS
    yield from check_interleavings(count, setting.device, setting.seed)
    yield from measure_rates(setting.device, setting.is_tiny)
