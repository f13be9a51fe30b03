"""The contract of attention backends: a query attends to its own past only, through any block table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from baton.core.drafts import ROOT
from baton.core.kv_spec import KVEncoding
from baton.engine.attention.base import AttentionBackend, AttentionVariant
from baton.engine.batch.attention_groups import Span
from baton.engine.kv_cache.paged_cache import PagedKVCache
from benchmarks.device_run.attention_world import Shape, World

CreateBackend = Callable[[PagedKVCache], AttentionBackend]

NUM_BLOCKS = 48


@st.composite
def trees(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(ROOT, node - 1)) for node in range(size))


@st.composite
def span_lists(draw: st.DrawFn, block_size: int) -> list[Span]:
    free = draw(st.permutations(range(NUM_BLOCKS)))
    spans = []
    for _ in range(draw(st.integers(1, 3))):
        start, num_tokens = draw(st.integers(0, 20)), draw(st.integers(1, 9))
        # A tree may begin before the new tokens, and never with the last known one.
        size = draw(st.integers(0, start + num_tokens - 1))
        parents = draw(trees(min(size, 12))) if draw(st.booleans()) else ()
        first_key = draw(st.integers(0, max(0, min(start, start + num_tokens - len(parents) - 1))))
        count = -(-(start + num_tokens) // block_size)
        spans.append(Span(free[:count], start, num_tokens, parents, first_key))
        free = free[count:]
    return spans


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, list[Span], AttentionVariant]:
    shape = Shape(
        num_kv_heads=draw(st.integers(1, 2)),
        share=draw(st.sampled_from([1, 2, 3])),
        key_dim=draw(st.sampled_from([4, 8, 20])),
        value_dim=draw(st.sampled_from([4, 12])),
        block_size=draw(st.integers(2, 5)),
        encoding=draw(st.sampled_from(KVEncoding)),
        has_latents=draw(st.booleans()),
    )
    sinks = torch.linspace(-2, 2, shape.num_kv_heads * shape.share) if draw(st.booleans()) else None
    variant = AttentionVariant(
        scaling=shape.key_dim**-0.5,
        sliding_window=draw(st.none() | st.integers(1, 12)),
        softcap=draw(st.sampled_from([None, 1.5])),
        sinks=sinks,
        has_latents=shape.has_latents,
    )
    return shape, draw(span_lists(shape.block_size)), variant


@settings(
    deadline=None,
    max_examples=30,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=cases())
def test_every_query_attends_to_its_own_past(
    create_backend: CreateBackend, case: tuple[Shape, list[Span], AttentionVariant]
) -> None:
    shape, spans, variant = case
    world = World(shape, spans, num_blocks=NUM_BLOCKS)
    output = world.run(create_backend(world.cache), variant)
    torch.testing.assert_close(output.double(), world.expected(variant), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "encoding",
    [
        KVEncoding.NATIVE,
        pytest.param(KVEncoding.INT8, marks=pytest.mark.thorough(covered_by="test_half_precision_is_accurate")),
    ],
)
@pytest.mark.parametrize(
    "variant",
    [
        AttentionVariant(scaling=0.35),
        AttentionVariant(scaling=0.35, sliding_window=90, softcap=2.0, sinks=torch.linspace(-1, 1, 4)),
    ],
    ids=["plain", "everything"],
)
def test_contexts_span_several_programs(
    create_backend: CreateBackend, variant: AttentionVariant, encoding: KVEncoding
) -> None:
    """Long ones, of sequences with few new tokens and, apart from them, with many."""
    shape = Shape(block_size=16, encoding=encoding)
    spans = [Span(list(range(12)), 180, 1), Span(list(range(21, 31)), 80, 4, (ROOT, ROOT, 0))]
    for step in (spans, [*spans, Span(list(range(31, 45)), 70, 40)]):
        world = World(shape, step)
        output = world.run(create_backend(world.cache), variant)
        torch.testing.assert_close(output.double(), world.expected(variant), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoding", KVEncoding)
def test_half_precision_is_accurate(create_backend: CreateBackend, encoding: KVEncoding) -> None:
    """float16, since Triton's interpreter multiplies bfloat16 by its bits."""
    world = World(Shape(dtype="float16", encoding=encoding), [Span([3, 5, 1], 10, 1), Span([7, 9], 2, 5)])
    variant = AttentionVariant(scaling=0.35, sliding_window=6)
    output = world.run(create_backend(world.cache), variant)
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.double(), world.expected(variant), rtol=0.004, atol=0.004)


@pytest.mark.parametrize("encoding", KVEncoding)
def test_many_small_weights_survive_half_precision(create_backend: CreateBackend, encoding: KVEncoding) -> None:
    """One key takes nearly all of the mass and has a value of nearly nothing, as first tokens do in many models."""
    shape = Shape(num_kv_heads=1, share=1, dtype="float16", encoding=encoding, block_size=16)
    world = World(shape, [Span(list(range(16)), 255, 1)])
    slots = torch.arange(255)
    keys, values = torch.zeros(255, 1, 8), torch.full((255, 1, 8), 0.05)
    keys[0, 0, 0], values[0] = 10.5, 1e-4
    world.cache.write(0, slots, keys.half(), values.half())
    world.query[:], world.key[:], world.value[:] = 0, 0, 0.05
    world.query[..., 0] = 1
    variant = AttentionVariant(scaling=1.0)
    output = world.run(create_backend(world.cache), variant)
    torch.testing.assert_close(output.double(), world.expected(variant), rtol=0.01, atol=0)


@pytest.mark.parametrize("encoding", KVEncoding)
def test_many_heads_share_latents(create_backend: CreateBackend, encoding: KVEncoding) -> None:
    """More heads than a program computes, and a number of them that no power of two divides."""
    shape = Shape(num_kv_heads=1, share=20, key_dim=8, value_dim=16, block_size=8, encoding=encoding, has_latents=True)
    world = World(shape, [Span([3, 5, 1], 20, 1), Span([7, 9], 2, 2), Span(list(range(20, 24)), 30, 2, (ROOT,))])
    variant = AttentionVariant(scaling=0.2, has_latents=True)
    output = world.run(create_backend(world.cache), variant)
    torch.testing.assert_close(output.double(), world.expected(variant), rtol=1e-4, atol=1e-5)


def test_layers_of_one_batch_can_differ(create_backend: CreateBackend) -> None:
    spans = [Span([3, 5, 1], 9, 3, (ROOT, ROOT)), Span([7, 9], 6, 1)]
    world = World(Shape(), spans, num_layers=2)
    backend = create_backend(world.cache)
    for layer, window in enumerate([None, 3]):
        variant = AttentionVariant(scaling=0.35, sliding_window=window)
        output = world.run(backend, variant, layer)
        torch.testing.assert_close(output.double(), world.expected(variant, layer), rtol=1e-4, atol=1e-5)


def test_batches_can_alternate(create_backend: CreateBackend) -> None:
    world = World(Shape(), [Span([3, 5, 1], 9, 2)])
    other = World(Shape(), [Span([2], 0, 2)])
    backend = create_backend(world.cache)
    variant = AttentionVariant(scaling=0.35)
    first = world.run(backend, variant)
    backend.forward(0, other.query, other.key, other.value, other.batch, variant)
    assert torch.equal(world.run(backend, variant), first)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # meant: it is where tanh has its limit
def test_extreme_scores_neither_overflow_nor_vanish(create_backend: CreateBackend) -> None:
    world = World(Shape(), [Span([3, 5, 1], 9, 2)])
    for variant in (AttentionVariant(scaling=40.0), AttentionVariant(scaling=400.0, softcap=30.0)):
        output = world.run(create_backend(world.cache), variant)
        torch.testing.assert_close(output.double(), world.expected(variant), rtol=1e-3, atol=1e-4)
        lower = replace(variant, sinks=torch.full((4,), -200.0))
        torch.testing.assert_close(world.run(create_backend(world.cache), lower), output, rtol=1e-3, atol=1e-4)
