"""Measures the use of a GPU's memory with the largest steps that a worker will run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.errors import ConfigError, UnsupportedModelError
from baton.core.memory_budget import DeviceMemoryUse
from baton.core.prompt_logprobs import MAX_SCORED_TOKENS
from baton.core.request import MAX_LOGPROBS, Request, SamplingParams
from baton.engine.attention.key_sharing import KeySharing
from baton.engine.attention.paged_plan import PlanSize
from baton.engine.device.device_errors import is_device_lost, is_out_of_memory
from baton.engine.runner.cuda_graphs import make_buckets
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.prompt_scores import queue_scores
from baton.engine.sampling.sampler import queue_sample
from baton.engine.sampling.verification import sampling_row

CONTEXT_BYTES = 512 * 2**20
"""Estimate of CUDA's context and the kernels of torch and its libraries, which torch's allocator does not count."""
SMALL_CACHE_BLOCKS = 16
BYTES_PER_GRAPH = 8 * 2**20
"""Estimate of the driver's own memory for a graph of one or two thousand kernels."""
SIDE_WORKSPACE_BYTES = 64 * 2**20
"""Estimate of cuBLAS' workspace for the stream that graphs are recorded on."""
_INT32_BYTES = _FLOAT32_BYTES = 4


class DeviceMemory(Protocol):
    """A device's memory, as this process sees it. All sizes are bytes."""

    def total_and_free(self) -> tuple[int, int]:
        """Total and free memory of the whole device, over all processes."""
        ...

    def allocated(self) -> int:
        """Memory in this process's tensors now."""
        ...

    def reset_peak(self) -> None:
        """Starts a new :meth:`peak`."""
        ...

    def peak(self) -> int:
        """Maximum memory in this process's tensors since :meth:`reset_peak`."""
        ...

    def release(self) -> None:
        """Returns memory that no tensor uses to the device."""
        ...

    def limit(self, num_bytes: int) -> None:
        """Makes allocations of this process fail that exceed ``num_bytes``."""
        ...


class CudaMemory:
    """Implements :class:`DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_and_free(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return total, free

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def limit(self, num_bytes: int) -> None:
        total, _ = self.total_and_free()
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), self._device)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps of a worker.

    Attributes:
        chunk_tokens: prompt tokens of a step.
        max_num_seqs: sequences of a step.
        max_draft_tokens: drafted tokens of a sequence that a step verifies; all together are at most ``chunk_tokens``.
        max_model_len: tokens of a sequence.
        records_graphs: whether steps without prompts are recorded as CUDA graphs, where the runner can.
    """

    chunk_tokens: int
    max_num_seqs: int
    max_draft_tokens: int
    max_model_len: int
    records_graphs: bool

    @property
    def draft_tokens(self) -> int:
        """Drafted tokens of each sequence in a step of ``max_num_seqs``."""
        return min(self.max_draft_tokens, self.chunk_tokens // self.max_num_seqs)


def measure_use(runner: ModelRunner, limits: StepLimits, memory: DeviceMemory) -> DeviceMemoryUse:
    """Runs the largest steps over a small cache and measures the peak of memory.

    Args:
        runner: a runner without graphs, over a cache of a few blocks, which the steps overwrite.

    Raises:
        ConfigError: even these steps do not fit in addition to the weights.
        UnsupportedModelError: the model fails over the paged cache.
    """
    total, _ = memory.total_and_free()
    before = memory.allocated()
    try:
        activations = max(
            _peak_of(runner, _prompt_step(runner, limits), memory, samples=True),
            _peak_of(runner, _verify_step(runner, limits), memory, samples=True),
            _peak_of(runner, _scored_step(runner, limits), memory, samples=True),
        )
        sharing = runner.backend.key_sharing if limits.records_graphs else None
        graphs = 0 if sharing is None else _graph_bytes(runner, limits, memory, sharing)
    except Exception as error:
        if is_out_of_memory(error):
            _, free = memory.total_and_free()
            raise ConfigError(
                f"The GPU's memory of {total / 2**30:.2f} GiB does not hold the weights ({before / 2**30:.2f} GiB) and "
                f"a step of {limits.chunk_tokens} prompt tokens or {limits.max_num_seqs} sequences "
                f"({free / 2**30:.2f} GiB are free). Lower chunk_tokens or max_num_seqs, or set engine.weights: fp8."
            ) from error
        if is_device_lost(error):
            raise
        name = type(runner.loaded.model).__name__
        raise UnsupportedModelError(f"{name} fails with the paged cache: {type(error).__name__}: {error}") from error
    cache = sum(tensor.numel() * tensor.element_size() for tensor in (*runner.cache.keys, *runner.cache.values))
    memory.release()
    _, free = memory.total_and_free()
    return DeviceMemoryUse(total, free + cache, CONTEXT_BYTES, before - cache, activations, graphs)


def _peak_of(runner: ModelRunner, plan: list[ScheduledSequence], memory: DeviceMemory, *, samples: bool) -> int:
    """Bytes that a step takes beyond what was allocated before it."""
    memory.release()
    before = memory.allocated()
    memory.reset_peak()
    batch = runner.build_batch(plan)
    logits = runner.forward(batch)
    if samples:
        rows = [
            sampling_row(sequence.request, sequence.draft.token_ids[:index])
            for sequence, places in zip(batch.sequences, batch.rows_of, strict=True)
            for index in range(len(places))
        ]
        queue_sample(logits[: len(rows)], rows).read()
        queue_scores(batch, logits[len(rows) :]).read()
    if runner.features is not None:
        runner.features.take()
    return memory.peak() - before


def _prompt_step(runner: ModelRunner, limits: StepLimits) -> list[ScheduledSequence]:
    """A chunk at the end of the longest prompt."""
    count = min(limits.chunk_tokens, limits.max_model_len - 1)
    return [_sequence(runner, limits.max_model_len - 1, count)]


def _verify_step(runner: ModelRunner, limits: StepLimits) -> list[ScheduledSequence]:
    """A step of ``max_num_seqs`` sequences with drafts."""
    length = min(limits.max_model_len, runner.spec.block_size)
    draft = Draft((0,) * limits.draft_tokens)
    return [_sequence(runner, length, 1, draft, str(index)) for index in range(limits.max_num_seqs)]


def _scored_step(runner: ModelRunner, limits: StepLimits) -> list[ScheduledSequence]:
    """As many prompt tokens as get log probabilities in a step."""
    count = min(MAX_SCORED_TOKENS, limits.chunk_tokens, limits.max_model_len - 1)
    return [_sequence(runner, limits.max_model_len - 1, count, num_top=min(MAX_LOGPROBS, runner.loaded.vocab_size))]


def _sequence(
    runner: ModelRunner,
    length: int,
    count: int,
    draft: Draft | None = None,
    name: str = "0",
    num_top: int | None = None,
) -> ScheduledSequence:
    """The last ``count`` tokens of a request. Its blocks repeat, so that a small cache holds any length."""
    params = SamplingParams(temperature=1.0, top_p=0.9, prompt_logprobs=num_top)
    request = Request(f"largest-step-{name}", [0] * length, params)
    drafted = 0 if draft is None else len(draft)
    num_blocks = -(-(length + drafted) // runner.spec.block_size)
    request.block_ids = [index % runner.cache.num_blocks for index in range(num_blocks)]
    request.num_computed_tokens = length - count
    return ScheduledSequence(request, count) if draft is None else ScheduledSequence(request, count, draft)


def _graph_bytes(runner: ModelRunner, limits: StepLimits, memory: DeviceMemory, sharing: KeySharing) -> int:
    """Memory that :meth:`baton.engine.runner.model_runner.ModelRunner.capture_graphs` will take.

    Its pool holds the activations of the largest bucket, which no step outside of graphs can use. The graphs' output
    rows and plans are added to it.
    """
    buckets = make_buckets(limits.max_num_seqs, limits.max_draft_tokens)
    if not buckets:
        return 0
    largest = max(buckets, key=lambda bucket: bucket.num_tokens)
    draft = Draft((0,) * (largest.tokens_per_seq - 1))
    plan = [_sequence(runner, runner.spec.block_size, 1, draft, str(index)) for index in range(largest.num_seqs)]
    pool = _peak_of(runner, plan, memory, samples=False)
    rows = largest.num_tokens * runner.loaded.vocab_size * _FLOAT32_BYTES
    num_blocks = -(-(limits.max_model_len + max(bucket.tokens_per_seq for bucket in buckets)) // runner.spec.block_size)
    extra_pieces = sharing.most_extra_pieces(num_blocks * runner.spec.block_size)
    plan_words: int = sum(
        PlanSize(bucket.num_seqs + 1, bucket.num_tokens, num_blocks, bucket.tokens_per_seq - 1, extra_pieces)
        .places[-1]
        .stop
        for bucket in buckets
    )
    return pool + rows + plan_words * _INT32_BYTES + len(buckets) * BYTES_PER_GRAPH + SIDE_WORKSPACE_BYTES
