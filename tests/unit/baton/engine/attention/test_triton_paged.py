"""The Triton backend beyond the contract: launches, uploads and whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.core.drafts import ROOT
from baton.core.kv_spec import KVCacheSpec, LayerSpec
from baton.engine.attention import paged_plan
from baton.engine.attention.base import AttentionBackend, AttentionVariant
from baton.engine.attention.paged_plan import PlannedBatch, PlanSize, StaticPlan
from baton.engine.batch.attention_groups import Span, group_spans
from baton.engine.kv_cache.paged_cache import PagedKVCache, slots_of
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from tests.engine_runs import build_engine, run_tokens
from tests.tiny_models import model_with_reference, random_prompts

CreateBackend = Callable[[PagedKVCache], AttentionBackend]

CPU = torch.device("cpu")
BLOCK_SIZE = 4
VARIANT = AttentionVariant(scaling=0.35)
NUM_HEADS, KEY_DIM = 2, 8


class Counting:
    """A kernel that counts its launches, and remembers their grids."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self._kernel[grid]


@pytest.fixture
def launches(create_triton: CreateBackend, monkeypatch: pytest.MonkeyPatch) -> tuple[Counting, Counting]:
    """Counts the launches of the two kernels."""
    from baton.engine.attention import triton_paged

    attend, merge = Counting(triton_paged.attend), Counting(triton_paged.merge)
    monkeypatch.setattr(triton_paged, "attend", attend)
    monkeypatch.setattr(triton_paged, "merge", merge)
    return attend, merge


def full_cache(num_layers: int = 1) -> PagedKVCache:
    """One KV head for all heads; random numbers everywhere."""
    spec = KVCacheSpec("model", "float32", BLOCK_SIZE, (LayerSpec(1, KEY_DIM, KEY_DIM),) * num_layers)
    cache = PagedKVCache(spec, 32, CPU)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def planned(spans: list[Span], backend: AttentionBackend) -> PlannedBatch:
    assert backend.key_sharing is not None
    slots = torch.cat([slots_of(span.block_ids, span.start, span.end, BLOCK_SIZE) for span in spans])
    return PlannedBatch(slots, paged_plan.make_plan(spans, CPU, backend.key_sharing))


def attend_cached(backend: AttentionBackend, cache: PagedKVCache, batch: Any, seed: int = 1) -> torch.Tensor:
    """Random queries; the keys and values at the batch's slots stay what they are."""
    num_tokens = len(batch.slots)
    query = torch.randn(num_tokens, NUM_HEADS, KEY_DIM, generator=torch.Generator().manual_seed(seed))
    keys, values = cache.keys[0][batch.slots], cache.values[0][batch.slots]
    return backend.forward(0, query, keys, values, batch, VARIANT)


def test_only_long_contexts_of_few_sequences_are_split(
    create_triton: CreateBackend, launches: tuple[Counting, Counting]
) -> None:
    attend, merge = launches
    cache = full_cache()
    backend = create_triton(cache)
    attend_cached(backend, cache, planned([Span(list(range(10)), 36, 1)], backend))
    attend_cached(backend, cache, planned([Span([3], 2, 1)], backend))
    assert attend.grids == [(10 // 8 + 10, 1), (1, 1)]  # 37 keys in ten pieces
    assert merge.grids == [(1, NUM_HEADS)]


def test_prompts_do_not_affect_the_tiles_of_decoding_sequences(
    create_triton: CreateBackend, launches: tuple[Counting, Counting]
) -> None:
    attend, _ = launches
    cache = full_cache()
    spans = [Span([0], 2, 1), Span([1, 2], 3, 1), Span(list(range(3, 23)), 0, 65)]
    backend = create_triton(cache)
    attend_cached(backend, cache, planned(spans, backend))
    # Tiles of eight tokens with two heads: the last one of each piece need not be whole. The prompt has eleven pieces.
    assert attend.grids == [(2 // 8 + 2, 1), (11 * 65 // 8 + 11, 1)]


def test_a_batch_is_uploaded_once(create_triton: CreateBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[int] = []
    original = paged_plan.upload

    def counted(array: Any, device: torch.device) -> torch.Tensor:
        uploads.append(array.size)
        return original(array, device)

    monkeypatch.setattr(paged_plan, "upload", counted)

    class Batch:
        slots = torch.tensor([0, 1])
        groups = group_spans([Span([0], 0, 2)], BLOCK_SIZE, CPU, torch.float32)

    cache = full_cache(num_layers=2)
    backend = create_triton(cache)
    query, key = torch.randn(2, NUM_HEADS, KEY_DIM), torch.randn(2, 1, KEY_DIM)
    batch = Batch()
    for layer in range(2):
        backend.forward(layer, query, key, key, batch, VARIANT)
    assert len(uploads) == 1
    backend.forward(0, query, key, key, Batch(), VARIANT)
    assert len(uploads) == 2


def test_a_static_plan_matches_exactly_sized_plans(create_triton: CreateBackend) -> None:
    """Batches of other shapes one after the other, and nothing but numbers in the rows that are left over."""
    cache = full_cache()
    cache.keys[0][-BLOCK_SIZE:] = cache.values[0][-BLOCK_SIZE:] = 0.5
    backend = create_triton(cache)
    assert backend.key_sharing is not None
    static = StaticPlan(PlanSize(5, 16, 4, tree_size=6), 4, BLOCK_SIZE, 31, CPU, backend.key_sharing)
    for spans in (
        [Span([1, 2, 3], 9, 1), Span([4], 0, 4), Span([5, 6], 4, 3, (ROOT, ROOT))],
        [Span([7, 8], 5, 2)],
        [Span([9, 10], 6, 2, (ROOT, ROOT, 0, 1))],
        [Span([block], 3, 1) for block in (11, 12, 13, 14)],
    ):
        exact = planned(spans, backend)
        expected = attend_cached(backend, cache, exact)
        num_tokens = len(expected)
        assert static.fits(spans)
        static.fill(spans)
        slots = torch.full((16,), 31 * BLOCK_SIZE)
        slots[:num_tokens] = exact.slots
        query = torch.randn(num_tokens, NUM_HEADS, KEY_DIM, generator=torch.Generator().manual_seed(1))
        padded = torch.zeros(16, NUM_HEADS, KEY_DIM)
        padded[:num_tokens] = query
        batch = PlannedBatch(slots, static.plan)
        output = backend.forward(0, padded, cache.keys[0][slots], cache.values[0][slots], batch, VARIANT)
        torch.testing.assert_close(output[:num_tokens], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(output[num_tokens:], torch.full_like(output[num_tokens:], 0.5))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_whole_models_match_the_tokens_of_transformers(create_triton: CreateBackend, name: str) -> None:
    """Grouped queries; windows with capped scores; sinks. Chunked prompts among sequences that decode."""
    prompts = random_prompts([11, 3])
    model, expected = model_with_reference(name, prompts, 4)
    runner = ModelRunner(
        prepare_model(model, "float32"),
        32,
        BLOCK_SIZE,
        RunnerOptions(attention_backend="triton_paged", decoder="transformers"),
    )
    check_model(runner)
    assert run_tokens(build_engine(runner, chunk_tokens=6), prompts, 4) == expected
