"""Random batches of attention, on which a backend must compute the right numbers and touch no other memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from baton.core.drafts import ROOT
from baton.core.kv_spec import KVEncoding
from baton.engine.attention.base import AttentionBackend, AttentionVariant
from baton.engine.attention.key_sharing import UNDIVIDED
from baton.engine.attention.paged_plan import PlannedBatch, PlanSize, StaticPlan
from baton.engine.batch.attention_groups import Span
from baton.engine.kv_cache.paged_cache import PagedKVCache
from benchmarks.device_run.attention_world import Shape, World
from benchmarks.device_run.part import Row

CreateBackend = Callable[[PagedKVCache], AttentionBackend]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The ranges from which cases are drawn.

    Attributes:
        dtypes: used in turn.
        value_dims: value dims for some key dims; for the others, the value dim equals the key dim.
        most_heads: maximum number of query heads.
        latents: key dim, value dim and numbers of query heads of cases with latents.
        long_context: number of keys of the longest sequence.
        prompt: number of new tokens of the longest prompt.
        batch: number of sequences of the largest batch.
    """

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    key_dims: tuple[int, ...] = (64, 96, 128, 192, 256)
    value_dims: tuple[tuple[int, int], ...] = ((192, 128),)
    shares: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 16)
    most_heads: int = 32
    latents: tuple[int, int, tuple[int, ...]] = (64, 512, (16, 20, 128))
    block_sizes: tuple[int, ...] = (8, 16, 32)
    windows: tuple[int, ...] = (1, 7, 64, 200)
    long_context: int = 5000
    prompt: int = 300
    batch: int = 48
    tree: int = 40


# Without bfloat16, which Triton's interpreter computes wrongly, as integers.
TINY = Sizes(("float32", "float16"), (8, 20), ((20, 12),), (1, 2, 3), 6, (8, 12, (4, 20)), (4, 8), (1, 7), 48, 20, 3, 6)
_CASES_PER_LATENTS = 7
"""No divisor of the numbers of kinds and of dtypes, so that all of them occur with latents."""
KINDS = ("decode", "long", "chains", "trees", "prompts", "mixed")


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One batch.

    Attributes:
        padding: extra sequences and tokens of a static plan; ``None`` means a plan of the batch's size.
    """

    name: str
    shape: Shape
    spans: tuple[Span, ...]
    scaling: float
    window: int | None
    softcap: float | None
    has_sinks: bool
    padding: tuple[int, int] | None
    seed: int

    @property
    def cost(self) -> int:
        """The number of products in the scores, a measure of the case's size."""
        pairs = sum(span.num_tokens * span.end for span in self.spans)
        return pairs * self.shape.num_kv_heads * self.shape.share * self.shape.query_dim


def draw_cases(count: int, sizes: Sizes, seed: int = 0) -> dict[str, AttentionCase]:
    """Draws random cases by name. Kinds, dtypes and encodings alternate, so that all combinations occur."""
    cases = [_draw_case(index, random.Random(seed * 1_000_003 + index), sizes) for index in range(count)]
    return {case.name: case for case in cases}


def _draw_case(index: int, chance: random.Random, sizes: Sizes) -> AttentionCase:
    kind = KINDS[index % len(KINDS)]
    turn = index // len(KINDS) + index
    key_dim = chance.choice(sizes.key_dims)
    share = chance.choice(sizes.shares)
    shape = Shape(
        num_kv_heads=chance.choice([heads for heads in (1, 2, 4, 8) if heads * share <= sizes.most_heads]),
        share=share,
        key_dim=key_dim,
        value_dim=chance.choice([key_dim, dict(sizes.value_dims).get(key_dim, key_dim)]),
        block_size=chance.choice(sizes.block_sizes),
        dtype=sizes.dtypes[turn % len(sizes.dtypes)],
        encoding=KVEncoding.INT8 if turn // len(sizes.dtypes) % 3 == 1 else KVEncoding.NATIVE,
    )
    if index % _CASES_PER_LATENTS == _CASES_PER_LATENTS - 1:
        key_dim, value_dim, heads_of_latents = sizes.latents
        share = chance.choice(heads_of_latents)
        shape = replace(shape, num_kv_heads=1, share=share, key_dim=key_dim, value_dim=value_dim, has_latents=True)
    spans = _draw_spans(kind, chance, sizes, shape.block_size)
    window = chance.choice(sizes.windows) if chance.random() < 0.35 else None
    softcap = chance.choice([2.0, 30.0]) if chance.random() < 0.25 else None
    has_sinks = chance.random() < 0.25
    padding = None
    if kind in ("decode", "long", "chains", "trees") and chance.random() < 0.5:
        padding = (1 + chance.randrange(4), chance.randrange(9))
    extras = [
        *([f"window {window}"] if window else []),
        *([f"cap {softcap:g}"] if softcap else []),
        *(["sinks"] if has_sinks else []),
        *(["padded"] if padding else []),
    ]
    heads = f"{shape.num_kv_heads * share}/{shape.num_kv_heads} heads of {shape.key_dim}"
    heads += f"+{shape.value_dim}" if shape.value_dim != shape.key_dim else ""
    heads += " latents" if shape.has_latents else ""
    encoding = "int8 KV" if shape.encoding is KVEncoding.INT8 else ""
    words = [f"{index:02d}", kind, shape.dtype, encoding, heads, f"blocks of {shape.block_size}", *extras]
    return AttentionCase(
        " ".join(word for word in words if word),
        shape,
        spans,
        # Some distributions are peaked, as in trained models, so that a single wrong key is noticed.
        shape.query_dim**-0.5 * chance.choice([1.0, 3.0]),
        window,
        softcap,
        has_sinks,
        padding,
        seed=index,
    )


def _draw_spans(kind: str, chance: random.Random, sizes: Sizes, block_size: int) -> tuple[Span, ...]:
    long, prompt = sizes.long_context, sizes.prompt
    lengths: list[tuple[int, int, int]] = []  # start, new tokens, nodes of the tree
    if kind in ("decode", "mixed"):
        lengths += [(chance.randrange(long // 4), 1, 0) for _ in range(chance.randint(1, sizes.batch))]
    if kind == "long":
        starts = [long - chance.randrange(long // 2) for _ in range(chance.randint(1, 2))]
        lengths += [(start, chance.choice([1, 1, 3]), 0) for start in starts]
    if kind == "chains":
        lengths += [(chance.randrange(long // 4), chance.randint(2, 9), 0) for _ in range(chance.randint(1, 6))]
    if kind == "trees":
        for _ in range(chance.randint(1, 4)):
            size = chance.randint(2, sizes.tree)
            # Part of a tree may be older than the new tokens, and there may be tokens between these and the tree.
            known = chance.randrange(size // 2) if chance.random() < 0.3 else -chance.randint(1, 3)
            lengths.append((max(1, chance.randrange(long // 4)) + max(0, known), size - known, size))
    if kind in ("prompts", "mixed"):
        for _ in range(chance.randint(1, 3) if kind == "prompts" else 1):
            lengths.append((chance.choice([0, chance.randrange(long // 8)]), chance.randint(prompt // 5, prompt), 0))
    if chance.random() < 0.7:  # as the engine sorts them
        lengths.sort(key=lambda each: (each[1], -each[0] - each[1]))
    else:
        chance.shuffle(lengths)
    counts = [-(-(start + num_tokens) // block_size) for start, num_tokens, _ in lengths]
    free = chance.sample(range(sum(counts) + 3), sum(counts))
    spans = []
    for (start, num_tokens, size), count in zip(lengths, counts, strict=True):
        parents = tuple(chance.randint(max(ROOT, node - 6), node - 1) for node in range(size))
        latest = min(start, start + num_tokens - size - 1)
        first_key = chance.randint(0, max(0, latest)) if chance.random() < 0.15 else 0
        spans.append(Span([free.pop() for _ in range(count)], start, num_tokens, parents, first_key))
    return tuple(spans)


def check_case(case: AttentionCase, create_backend: CreateBackend, device: torch.device) -> Row:
    """Runs the case and compares the results; :class:`~.attention_world.World` says which memory is NaN during the run.

    The row has the error and the tolerance of the worst number, and ``of_tolerance``, their ratio. It has ``error`` if
    other memory was touched.
    """
    num_blocks = sum(len(span.block_ids) for span in case.spans) + 3
    world = World(case.shape, case.spans, device=device, seed=case.seed, window=case.window, num_blocks=num_blocks)
    num_heads = case.shape.num_kv_heads * case.shape.share
    sinks = world.random(num_heads) if case.has_sinks else None
    variant = AttentionVariant(case.scaling, case.window, case.softcap, sinks, case.shape.has_latents)
    backend = create_backend(world.cache)
    before = [tensor.clone() for tensor in (*world.cache.keys, *world.cache.values)]
    with poisoned_allocations():
        if case.padding is not None and backend.key_sharing is not None:
            output, left_over = _run_padded(case, world, backend, variant)
        else:
            output, left_over = world.run(backend, variant), None
    exact = world.exact(variant)
    errors = (output.double().cpu() - exact.output).abs()
    # NaN would compare as no error.
    errors = torch.where(torch.isfinite(errors), errors, torch.inf)
    ratios = errors / exact.bound.clamp_min(1e-300)
    worst = int(ratios.argmax())
    problem = _problem(world, before, left_over)
    return {
        "name": case.name,
        "ok": bool(ratios.max() <= 1.0) and problem is None,
        "worst_error": float(errors.flatten()[worst]),
        "tolerance": float(exact.bound.flatten()[worst]),
        "of_tolerance": float(ratios.max()),
        **({"error": problem} if problem else {}),
    }


def _run_padded(
    case: AttentionCase, world: World, backend: AttentionBackend, variant: AttentionVariant
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the case in a static plan that held another batch before, as a CUDA graph does.

    Returns:
        The output of the case's tokens, and the output of the padding tokens.
    """
    more_seqs, more_tokens = case.padding or (1, 0)
    spans = list(case.spans)
    size = PlanSize(
        num_seqs=len(spans) + more_seqs,
        num_tokens=world.num_tokens + more_tokens,
        num_blocks=max(len(span.block_ids) for span in spans) + 2,
        tree_size=max(len(span.parents) for span in spans),
    )
    scratch, block_size = world.cache.scratch_block or 0, case.shape.block_size
    most = max(span.num_tokens for span in spans)
    static = StaticPlan(size, most, block_size, scratch, world.device, backend.key_sharing or UNDIVIDED)
    static.fill(spans[::-1])
    static.fill(spans)
    query, key, value = (
        torch.cat((own.contiguous(), own.new_full((more_tokens, *own.shape[1:]), 0.5)))
        for own in (world.query, world.key, world.value)
    )
    slots = torch.cat((world.batch.slots, world.batch.slots.new_full((more_tokens,), scratch * block_size)))
    output = backend.forward(0, query, key, value, PlannedBatch(slots, static.plan), variant)
    return output[: world.num_tokens], output[world.num_tokens :]


def _problem(world: World, before: Sequence[torch.Tensor], left_over: torch.Tensor | None) -> str | None:
    if left_over is not None and not bool(torch.isfinite(left_over).all()):
        return "rows that pad the batch are not finite"
    size, scratch = world.shape.block_size, world.cache.scratch_block or 0
    kept = torch.ones(before[0].shape[0], dtype=torch.bool)
    kept[world.batch.slots.cpu()] = False
    kept[scratch * size : (scratch + 1) * size] = False
    places = kept.nonzero()[:, 0].to(world.device)
    for old, new in zip(before, (*world.cache.keys, *world.cache.values), strict=True):
        if not torch.equal(old[places].view(torch.uint8), new[places].view(torch.uint8)):
            return "keys or values were written outside the new tokens' slots"
    return None


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """In this context torch fills new memory with NaN, so that numbers that a kernel does not write are noticed."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_lenient)


def smallest(cases: dict[str, AttentionCase], count: int) -> list[str]:
    """The names of the smallest cases."""
    return sorted(cases, key=lambda name: cases[name].cost)[:count]
