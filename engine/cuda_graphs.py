"""Decode and verification steps as CUDA graphs: recorded when a worker starts, replayed with one call.

A graph has a bucket's shape, so many sequences of so many tokens at most, and reads and writes memory whose addresses
stay. A step is copied in, replayed, and its rows are copied or viewed out of what the graph leaves behind:

token_ids, positions, slots    | a0 | b7 b8 | c4 | 0  0  0  0 |      what is left over writes to the scratch block,
plan                           | a  | b     | c  | the last   |      sees that block's first key, and is never read

Steps that fit no bucket, such as chunks of prompts, are computed as they were before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.paged_plan import PlannedBatch, PlanSize, StaticPlan
from engine.attention_groups import Span
from engine.batch import ForwardBatch
from engine.feature_tap import HiddenStates
from engine.forward_pass import TransformersForward
from engine.kv_cache import PagedKVCache

logger = logging.getLogger(__name__)

CUDA_GRAPHS = ("auto", "off")

_WARM_UP_RUNS = 2
_MOST_TOKENS = 512
_FINE_SIZES = (1, 2, 4, 8)
_COARSE_STEP = 8
_ROUGH_STEP = 32


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a graph has room for: ``num_seqs`` sequences of ``tokens_per_seq`` new tokens."""

    num_seqs: int
    tokens_per_seq: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.tokens_per_seq

    def holds(self, batch: ForwardBatch) -> bool:
        return len(batch.sequences) <= self.num_seqs and all(
            sequence.num_new_tokens <= self.tokens_per_seq for sequence in batch.sequences
        )


def make_buckets(max_num_seqs: int, max_draft_tokens: int, most_tokens: int = _MOST_TOKENS) -> list[Bucket]:
    """The smallest first.

    Args:
        max_num_seqs: of a step.
        max_draft_tokens: of a sequence; 0 where nothing is drafted.
        most_tokens: larger buckets are left out: such steps keep a GPU busy without graphs.
    """
    lengths = [1]
    while lengths[-1] < max_draft_tokens + 1:
        lengths.append(min(2 * lengths[-1], max_draft_tokens + 1))
    batches = [size for size in _batch_sizes(max_num_seqs) if size <= most_tokens]
    buckets = [Bucket(size, length) for size in batches for length in lengths if size * length <= most_tokens]
    return sorted(buckets, key=lambda bucket: (bucket.num_tokens, bucket.tokens_per_seq))


def _batch_sizes(largest: int) -> list[int]:
    sizes = [*_FINE_SIZES, *range(2 * _COARSE_STEP, 65, _COARSE_STEP), *range(64 + _ROUGH_STEP, largest, _ROUGH_STEP)]
    return [*(size for size in sizes if size < largest), largest]


class Recorder(Protocol):
    """Turns work into something that can be repeated."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns what does again, to the same memory, all that ``run`` does on the device.

        Raises:
            RuntimeError: that cannot be recorded.
        """
        ...


class CudaGraphRecorder:
    """Implements :class:`Recorder`. The graphs share their memory, so that only one may run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See :meth:`Recorder.record`. Before it records, it runs: libraries then have their workspaces."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


@dataclass(frozen=True, slots=True)
class _Memory:
    """Whose addresses the graphs know; smaller ones use the first rows.

    Attributes:
        token_ids, positions, slots, rows: int64 ``[num_tokens]``.
        logits: float32 ``[num_tokens, vocab_size]``.
        features: ``[num_tokens, num_features]``; None where no draft reads any.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    logits: torch.Tensor
    features: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Graph:
    bucket: Bucket
    plan: StaticPlan
    replay: Callable[[], None]


class GraphedForward:
    """Implements :class:`engine.forward_pass.ForwardPass`: by graphs once they are recorded, else by ``inner``.

    Args:
        inner: its backend takes plans.
        cache: with a scratch block.
        recorder: records what ``inner`` does.
    """

    def __init__(self, inner: TransformersForward, cache: PagedKVCache, recorder: Recorder) -> None:
        if cache.scratch_block is None:
            raise ValueError("graphs need a cache with a scratch block")
        self._inner = inner
        self._cache = cache
        self._scratch_block = cache.scratch_block
        self._recorder = recorder
        self._graphs: list[_Graph] = []
        self._recorded: tuple[tuple[Bucket, ...], int] | None = None
        self._memory: _Memory | None = None
        self.features = None if inner.features is None else _GraphFeatures(inner.features)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self, buckets: Sequence[Bucket], max_model_len: int) -> None:
        """Records a graph for each bucket, instead of those there are, unless it was done for the same ones before.

        What cannot be recorded is computed without.

        Args:
            max_model_len: tokens of a sequence, drafts aside.
        """
        wanted = (tuple(buckets), max_model_len)
        if not buckets or wanted == self._recorded:
            return
        self._recorded = wanted
        self._graphs.clear()
        most = max(bucket.num_tokens for bucket in buckets)
        room = max_model_len + max(bucket.tokens_per_seq for bucket in buckets)
        failures: list[RuntimeError] = []
        # The largest first: the others find their room in its memory.
        for bucket in sorted(buckets, key=lambda bucket: -bucket.num_tokens):
            try:
                self._graphs.append(self._record(bucket, most, room))
            except RuntimeError as error:
                failures.append(error)
        self._graphs.sort(key=lambda graph: (graph.bucket.num_tokens, graph.bucket.tokens_per_seq))
        if failures:
            logger.warning("%d of %d CUDA graphs could not be recorded: %s", len(failures), len(buckets), failures[0])

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See :meth:`engine.forward_pass.ForwardPass.forward`. Logits of a graph are valid until the next forward."""
        spans = [span for group in batch.groups for span in group.spans]
        graph, memory = self._find(batch, spans), self._memory
        if graph is None or memory is None:
            if self.features is not None:
                self.features.of_graph = None
            return self._inner.forward(batch)
        count, room = batch.num_tokens, graph.bucket.num_tokens
        scratch_slot = self._scratch_block * self._cache.spec.block_size
        for static, own, filler in (
            (memory.token_ids, batch.token_ids, 0),
            (memory.positions, batch.positions, 0),
            (memory.slots, batch.slots, scratch_slot),
        ):
            static[:count].copy_(own)
            static[count:room].fill_(filler)
        graph.plan.fill(spans)
        graph.replay()
        if self.features is not None and memory.features is not None:
            # Rows wait for their draft while other steps run.
            self.features.of_graph = memory.features[:count].clone()
        if batch.num_rows == count:
            return memory.logits[:count]
        return memory.logits.index_select(0, batch.logit_rows)

    def close(self) -> None:
        """See :meth:`engine.forward_pass.ForwardPass.close`."""
        self._graphs.clear()
        self._memory = None
        self._inner.close()

    def _find(self, batch: ForwardBatch, spans: Sequence[Span]) -> _Graph | None:
        """The smallest graph with room for the batch."""
        graphs = (graph for graph in self._graphs if graph.bucket.holds(batch))
        return next((graph for graph in graphs if graph.plan.fits(spans)), None)

    def _record(self, bucket: Bucket, most_tokens: int, most_places: int) -> _Graph:
        block_size = self._cache.spec.block_size
        size = PlanSize(
            num_seqs=bucket.num_seqs + 1,
            num_tokens=bucket.num_tokens,
            num_blocks=-(-most_places // block_size),
            tree_size=bucket.tokens_per_seq - 1,
        )
        plan = StaticPlan(size, bucket.tokens_per_seq, block_size, self._scratch_block, self._cache.device)
        if self._memory is None or len(self._memory.rows) < most_tokens:
            self._memory = self._make_memory(most_tokens, plan)
        memory, count = self._memory, bucket.num_tokens
        memory.slots.fill_(self._scratch_block * block_size)
        return _Graph(bucket, plan, self._recorder.record(lambda: self._run(memory, count, plan)))

    def _make_memory(self, num_tokens: int, plan: StaticPlan) -> _Memory:
        """As large as a forward of so many tokens needs, which is computed to find out what it yields."""
        device = self._cache.device
        token_ids, positions, slots = (torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in range(3))
        slots.fill_(self._scratch_block * self._cache.spec.block_size)
        rows = torch.arange(num_tokens, device=device)
        logits = self._inner.compute(token_ids, positions, rows, PlannedBatch(slots, plan.plan))
        features = None if self._inner.features is None else self._inner.features.take()
        return _Memory(token_ids, positions, slots, rows, logits, features)

    def _run(self, memory: _Memory, count: int, plan: StaticPlan) -> None:
        """What a graph does."""
        batch = PlannedBatch(memory.slots[:count], plan.plan)
        logits = self._inner.compute(memory.token_ids[:count], memory.positions[:count], memory.rows[:count], batch)
        memory.logits[:count].copy_(logits)
        if memory.features is not None and self._inner.features is not None:
            memory.features[:count].copy_(self._inner.features.take())


class _GraphFeatures:
    """Implements :class:`engine.feature_tap.HiddenStates` for forwards of either kind.

    Attributes:
        of_graph: the states of the last forward, if a graph computed it.
    """

    def __init__(self, tap: HiddenStates) -> None:
        self._tap = tap
        self.of_graph: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """See :meth:`engine.feature_tap.HiddenStates.take`."""
        taken, self.of_graph = self.of_graph, None
        return self._tap.take() if taken is None else taken

    def close(self) -> None:
        """Ends the reading."""
        self._tap.close()
