"""What every attention backend promises: each query sees its own past, by whatever blocks, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.attention.base import AttentionBackend, AttentionVariant
from engine.attention_groups import AttentionGroup, Span, group_spans
from engine.drafts import ROOT
from engine.kv_cache import TORCH_DTYPES, PagedKVCache, slots_of
from engine.kv_spec import KVCacheSpec, KVEncoding, LayerSpec
from tests.spoiled_cache import spoil

CreateBackend = Callable[[PagedKVCache], AttentionBackend]

CPU = torch.device("cpu")
NUM_BLOCKS = 48


@dataclass
class Batch:
    slots: torch.Tensor
    groups: list[AttentionGroup]


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int = 2
    share: int = 2
    key_dim: int = 8
    value_dim: int = 8
    block_size: int = 4
    dtype: str = "float32"
    encoding: KVEncoding = KVEncoding.NATIVE


class World:
    """A cache in which nothing is a number but what the spans may see, and new tokens for all of them."""

    def __init__(self, shape: Shape, spans: Sequence[Span], num_layers: int = 1) -> None:
        self.shape, self.spans = shape, spans
        self.dtype = TORCH_DTYPES[shape.dtype]
        self.generator = torch.Generator().manual_seed(0)
        layer = LayerSpec(shape.num_kv_heads, shape.key_dim, shape.value_dim)
        spec = KVCacheSpec("model", shape.dtype, shape.block_size, (layer,) * num_layers, encoding=shape.encoding)
        self.cache = PagedKVCache(spec, NUM_BLOCKS, CPU)
        spoil(self.cache)
        for index, span in product(range(num_layers), spans):
            old = slots_of(span.block_ids, span.first_key, span.start, shape.block_size)
            sizes = ((len(old), shape.num_kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
            self.cache.write(index, old, *(self.random(*size) for size in sizes))
        self.num_tokens = sum(span.num_tokens for span in spans)
        slots = [slots_of(span.block_ids, span.start, span.end, shape.block_size) for span in spans]
        self.batch = Batch(torch.cat(slots), group_spans(spans, shape.block_size, CPU, self.dtype))
        # As transformers passes them: [heads, tokens, dim] seen from the other side.
        self.query = self.random(shape.num_kv_heads * shape.share, self.num_tokens, shape.key_dim).transpose(0, 1)
        self.key = self.random(shape.num_kv_heads, self.num_tokens, shape.key_dim).transpose(0, 1)
        self.value = self.random(shape.num_kv_heads, self.num_tokens, shape.value_dim).transpose(0, 1)

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(self.dtype)

    def run(self, backend: AttentionBackend, variant: AttentionVariant, layer: int = 0) -> torch.Tensor:
        return backend.forward(layer, self.query, self.key, self.value, self.batch, variant)

    def expected(self, variant: AttentionVariant, layer: int = 0) -> torch.Tensor:
        """Token by token, head by head; the new keys and values are in the cache by now."""
        tokens = [(span, place) for span in self.spans for place in range(span.start, span.end)]
        return torch.stack([self._row(*token, index, variant, layer) for index, token in enumerate(tokens)])

    def _row(self, span: Span, place: int, token: int, variant: AttentionVariant, layer: int) -> torch.Tensor:
        places = seen_from(span, place, variant.sliding_window)
        slots = slots_of(span.block_ids, 0, span.end, self.shape.block_size)[places]
        heads = []
        for head in range(self.query.shape[1]):
            cached = self.cache.read(layer, slots)
            keys, values = (tensor[:, head // self.shape.share].double() for tensor in cached)
            scores = keys @ self.query[token, head].double() * variant.scaling
            if variant.softcap is not None:
                scores = variant.softcap * torch.tanh(scores / variant.softcap)
            if variant.sinks is None:
                heads.append(torch.softmax(scores, dim=0) @ values)
            else:
                scores = torch.cat((scores, variant.sinks[head : head + 1].double()))
                heads.append(torch.softmax(scores, dim=0)[:-1] @ values)
        return torch.stack(heads)


def seen_from(span: Span, place: int, window: int | None) -> list[int]:
    """Places whose keys a token sees, by walking up from it."""
    path, walked = [], place
    while walked >= span.first_key:
        path.append(walked)
        node = walked - span.tree_start
        if not span.parents or node < 0:
            walked -= 1
        else:
            parent = span.parents[node]
            walked = span.tree_start + parent if parent != ROOT else span.tree_start - 1
    return path if window is None else path[:window]


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
    )
    sinks = torch.linspace(-2, 2, shape.num_kv_heads * shape.share) if draw(st.booleans()) else None
    variant = AttentionVariant(
        scaling=shape.key_dim**-0.5,
        sliding_window=draw(st.none() | st.integers(1, 12)),
        softcap=draw(st.sampled_from([None, 1.5])),
        sinks=sinks,
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
def test_every_query_gets_the_softmax_over_its_own_past(
    create_backend: CreateBackend, case: tuple[Shape, list[Span], AttentionVariant]
) -> None:
    shape, spans, variant = case
    world = World(shape, spans)
    output = world.run(create_backend(world.cache), variant)
    torch.testing.assert_close(output.double(), world.expected(variant), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoding", [KVEncoding.NATIVE, pytest.param(KVEncoding.INT8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "variant",
    [
        AttentionVariant(scaling=0.35),
        AttentionVariant(scaling=0.35, sliding_window=90, softcap=2.0, sinks=torch.linspace(-1, 1, 4)),
    ],
    ids=["plain", "everything"],
)
def test_contexts_of_several_programs(
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
def test_half_precision(create_backend: CreateBackend, encoding: KVEncoding) -> None:
    """float16, since Triton's interpreter multiplies bfloat16 by its bits."""
    world = World(Shape(dtype="float16", encoding=encoding), [Span([3, 5, 1], 10, 1), Span([7, 9], 2, 5)])
    variant = AttentionVariant(scaling=0.35, sliding_window=6)
    output = world.run(create_backend(world.cache), variant)
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.double(), world.expected(variant), rtol=0.004, atol=0.004)


@pytest.mark.parametrize("encoding", KVEncoding)
def test_many_small_weights_do_not_vanish_in_half_precision(
    create_backend: CreateBackend, encoding: KVEncoding
) -> None:
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


def test_layers_of_one_batch_may_differ(create_backend: CreateBackend) -> None:
    spans = [Span([3, 5, 1], 9, 3, (ROOT, ROOT)), Span([7, 9], 6, 1)]
    world = World(Shape(), spans, num_layers=2)
    backend = create_backend(world.cache)
    for layer, window in enumerate([None, 3]):
        variant = AttentionVariant(scaling=0.35, sliding_window=window)
        output = world.run(backend, variant, layer)
        torch.testing.assert_close(output.double(), world.expected(variant, layer), rtol=1e-4, atol=1e-5)


def test_batches_take_turns(create_backend: CreateBackend) -> None:
    world = World(Shape(), [Span([3, 5, 1], 9, 2)])
    other = World(Shape(), [Span([2], 0, 2)])
    backend = create_backend(world.cache)
    variant = AttentionVariant(scaling=0.35)
    first = world.run(backend, variant)
    backend.forward(0, other.query, other.key, other.value, other.batch, variant)
    assert torch.equal(world.run(backend, variant), first)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # meant: it is where tanh has its limit
def test_scores_far_from_zero_neither_overflow_nor_vanish(create_backend: CreateBackend) -> None:
    world = World(Shape(), [Span([3, 5, 1], 9, 2)])
    for variant in (AttentionVariant(scaling=40.0), AttentionVariant(scaling=400.0, softcap=30.0)):
        output = world.run(create_backend(world.cache), variant)
        torch.testing.assert_close(output.double(), world.expected(variant), rtol=1e-3, atol=1e-4)
        lower = replace(variant, sinks=torch.full((4,), -200.0))
        torch.testing.assert_close(world.run(create_backend(world.cache), lower), output, rtol=1e-3, atol=1e-4)
