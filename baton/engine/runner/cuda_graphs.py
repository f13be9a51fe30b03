"""Decode and verification steps as CUDA graphs: recorded when a worker starts, replayed with one call.

A graph has the shape of a bucket, a maximum number of sequences and of tokens per sequence, and works at fixed
addresses. A step is copied in and replayed, and its rows are copied or viewed out of the graph's memory:

token_ids, positions, slots    | a0 | b7 b8 | c4 | 0  0  0  0 |      unused tokens write to the scratch block,
plan                           | a  | b     | c  | the last   |      see that block's first key, and are never read

Steps that fit no bucket, such as prompt chunks, are computed without a graph.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from baton.engine.attention.key_sharing import KeySharing
from baton.engine.attention.paged_plan import PlannedBatch, PlanSize, StaticPlan
from baton.engine.batch.attention_groups import Span
from baton.engine.batch.batch import ModelInput
from baton.engine.batch.hidden_states import HiddenStates
from baton.engine.device.device_errors import check_device
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.runner.forward_pass import TransformersForward
from baton.engine.runner.graph_recorder import ForwardWaitsError, Recorder, RecordingError, recording_errors

logger = logging.getLogger(__name__)


_MAX_TOKENS = 512
_FINE_SIZES = (1, 2, 4, 8)
_COARSE_STEP = 8
_ROUGH_STEP = 32


@dataclass(frozen=True, slots=True)
class Bucket:
    """Capacity of a graph: ``num_seqs`` sequences of ``tokens_per_seq`` new tokens."""

    num_seqs: int
    tokens_per_seq: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.tokens_per_seq

    def __str__(self) -> str:
        return f"{self.num_seqs}x{self.tokens_per_seq}"

    def holds(self, spans: Sequence[Span]) -> bool:
        return len(spans) <= self.num_seqs and all(span.num_tokens <= self.tokens_per_seq for span in spans)


def make_buckets(max_num_seqs: int, max_draft_tokens: int, max_tokens: int = _MAX_TOKENS) -> list[Bucket]:
    """Returns the buckets to record, smallest first.

    Args:
        max_num_seqs: limit of a step.
        max_draft_tokens: limit of a sequence; 0 without drafts.
        max_tokens: larger buckets are left out: such steps keep a GPU busy without graphs.
    """
    lengths = [1]
    while lengths[-1] < max_draft_tokens + 1:
        lengths.append(min(2 * lengths[-1], max_draft_tokens + 1))
    batches = [size for size in _batch_sizes(max_num_seqs) if size <= max_tokens]
    buckets = [Bucket(size, length) for size in batches for length in lengths if size * length <= max_tokens]
    return sorted(buckets, key=lambda bucket: (bucket.num_tokens, bucket.tokens_per_seq))


def _batch_sizes(largest: int) -> list[int]:
    sizes = [*_FINE_SIZES, *range(2 * _COARSE_STEP, 65, _COARSE_STEP), *range(64 + _ROUGH_STEP, largest, _ROUGH_STEP)]
    return [*(size for size in sizes if size < largest), largest]


@dataclass(frozen=True, slots=True)
class GraphFailure:
    """Why there are no graphs.

    Attributes:
        bucket: the bucket whose recording failed; no other was tried afterwards.
        missing: all buckets, since the graphs recorded before are dropped too.
        reason: what went wrong, for people.
        forward_waits: whether the model's forward waits for the device, which makes overlapped steps useless too.
    """

    bucket: Bucket
    missing: tuple[Bucket, ...]
    reason: str
    forward_waits: bool

    def describe(self) -> str:
        """The failure in one line."""
        return (
            f"CUDA graphs are off, and every step runs eagerly: bucket {self.bucket} could not be recorded, "
            f"{self.reason} (missing buckets: {' '.join(map(str, self.missing))})"
        )


@dataclass(frozen=True, slots=True)
class _Memory:
    """Tensors at the addresses that the graphs use; smaller graphs use the first rows.

    Attributes:
        token_ids, positions, slots, rows: int64 ``[num_tokens]``.
        logits: float32 ``[num_tokens, vocab_size]``.
        features: ``[num_tokens, num_features]``; ``None`` where no draft reads any.
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
    """Implements ``ForwardPass``: by graphs once they are recorded, else by ``inner``.

    Args:
        inner: the forward pass to record; its backend takes plans.
        cache: a cache with a scratch block.
        recorder: records ``inner`` only.
        sharing: how the backend's plans divide keys.

    Attributes:
        failure: why there are no graphs; ``None`` where none was tried, or all were recorded.
    """

    def __init__(
        self, inner: TransformersForward, cache: PagedKVCache, recorder: Recorder, sharing: KeySharing
    ) -> None:
        if cache.scratch_block is None:
            raise ValueError("graphs need a cache with a scratch block")
        self._inner = inner
        self._cache = cache
        self._scratch_block = cache.scratch_block
        self._recorder = recorder
        self._sharing = sharing
        self._graphs: list[_Graph] = []
        self._recorded: tuple[tuple[Bucket, ...], int] | None = None
        self._memory: _Memory | None = None
        self.failure: GraphFailure | None = None
        self.features = None if inner.features is None else _GraphFeatures(inner.features)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self, buckets: Sequence[Bucket], max_model_len: int) -> None:
        """Records a graph for each bucket and drops earlier graphs, unless they are of the same buckets.

        The first bucket that cannot be recorded ends it for good: graphs recorded so far are dropped, since they share
        memory with the one that failed, ``failure`` says why, and every step is computed by ``inner``.

        Args:
            max_model_len: limit for the tokens of a sequence, without drafts.

        Raises:
            Exception: the device is lost; its own error is raised.
        """
        wanted = (tuple(buckets), max_model_len)
        if not buckets or self.failure is not None or wanted == self._recorded:
            return
        self._drop_graphs()
        self.failure = self._record_all(buckets, max_model_len)
        if self.failure is None:
            self._recorded = wanted
            return
        logger.warning("%s", self.failure.describe())
        gc.collect()  # the error's traceback keeps tensors in the graphs' memory, and is often part of a cycle
        self._drop_graphs()
        check_device(self._cache.device)

    def forward(self, batch: ModelInput) -> torch.Tensor:
        """Implements ``ForwardPass.forward``. Logits of a graph are valid until the next forward."""
        spans = batch.spans
        graph, memory = self._find(spans), self._memory
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
            # A copy, since rows wait for their draft while other steps run.
            self.features.of_graph = memory.features[:count].clone()
        if batch.num_rows == count and not batch.num_prompt_rows:  # those are out of order
            return memory.logits[:count]
        return memory.logits.index_select(0, batch.logit_rows)

    def close(self) -> None:
        with suppress(RuntimeError):  # a lost device has nothing left to free
            self._drop_graphs()
        self._inner.close()

    def _find(self, spans: Sequence[Span]) -> _Graph | None:
        """The smallest graph with room for a batch, or ``None``."""
        graphs = (graph for graph in self._graphs if graph.bucket.holds(spans))
        return next((graph for graph in graphs if graph.plan.fits(spans)), None)

    def _record_all(self, buckets: Sequence[Bucket], max_model_len: int) -> GraphFailure | None:
        most = max(bucket.num_tokens for bucket in buckets)
        room = max_model_len + max(bucket.tokens_per_seq for bucket in buckets)
        # The largest first: the others fit into its memory.
        for bucket in sorted(buckets, key=lambda bucket: -bucket.num_tokens):
            try:
                with recording_errors():
                    self._graphs.append(self._record(bucket, most, room))
            except RecordingError as error:
                return GraphFailure(bucket, tuple(buckets), str(error), isinstance(error, ForwardWaitsError))
        self._graphs.sort(key=lambda graph: (graph.bucket.num_tokens, graph.bucket.tokens_per_seq))
        return None

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._recorded = None
        if self._inner.features is not None:
            self._inner.features.discard()
        self._recorder.discard()
        self._memory = None

    def _record(self, bucket: Bucket, max_tokens: int, max_places: int) -> _Graph:
        block_size = self._cache.spec.block_size
        size = PlanSize(
            num_seqs=bucket.num_seqs + 1,
            num_tokens=bucket.num_tokens,
            num_blocks=-(-max_places // block_size),
            tree_size=bucket.tokens_per_seq - 1,
        )
        plan = StaticPlan(
            size, bucket.tokens_per_seq, block_size, self._scratch_block, self._cache.device, self._sharing
        )
        if self._memory is None or len(self._memory.rows) < max_tokens:
            self._memory = self._make_memory(max_tokens, plan)
        memory, count = self._memory, bucket.num_tokens
        memory.slots.fill_(self._scratch_block * block_size)
        return _Graph(bucket, plan, self._recorder.record(lambda: self._run(memory, count, plan)))

    def _make_memory(self, num_tokens: int, plan: StaticPlan) -> _Memory:
        """Allocates memory for ``num_tokens`` tokens; runs one forward to learn the shapes of its outputs."""
        device = self._cache.device
        token_ids, positions, slots = (torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in range(3))
        slots.fill_(self._scratch_block * self._cache.spec.block_size)
        rows = torch.arange(num_tokens, device=device)
        logits = self._inner.compute(token_ids, positions, rows, PlannedBatch(slots, plan.plan))
        features = None if self._inner.features is None else self._inner.features.take()
        return _Memory(token_ids, positions, slots, rows, logits, features)

    def _run(self, memory: _Memory, count: int, plan: StaticPlan) -> None:
        """The work that a graph records."""
        batch = PlannedBatch(memory.slots[:count], plan.plan)
        logits = self._inner.compute(memory.token_ids[:count], memory.positions[:count], memory.rows[:count], batch)
        memory.logits[:count].copy_(logits)
        if memory.features is not None and self._inner.features is not None:
            memory.features[:count].copy_(self._inner.features.take())


class _GraphFeatures:
    """Implements :class:`baton.engine.batch.hidden_states.HiddenStates` for forwards with and without graphs.

    Attributes:
        of_graph: the states of the last forward, if a graph computed it.
    """

    def __init__(self, tap: HiddenStates) -> None:
        self._tap = tap
        self.of_graph: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        taken, self.of_graph = self.of_graph, None
        return self._tap.take() if taken is None else taken

    def close(self) -> None:
        """Stops reading hidden states."""
        self._tap.close()
