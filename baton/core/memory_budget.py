"""How a worker divides its memory, and how much is left for KV. No torch here: plain arithmetic.

total × utilization × share  =  context + weights + activations + graphs + KV
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import ConfigError

MIN_BLOCKS = 2
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemoryUse:
    """Memory measured on a GPU before its KV cache exists, in bytes.

    Attributes:
        total: memory of the GPU.
        free: memory of the GPU that no process uses now.
        context: memory of this process outside of tensors: CUDA's context, loaded kernels.
        weights: tensors that stay, those of a draft included.
        activations: peak of what a step allocates.
        graphs: memory that CUDA graphs will take.
    """

    total: int
    free: int
    context: int
    weights: int
    activations: int
    graphs: int


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How a worker divides its memory, in bytes. Zero means unknown; on a CPU most values are.

    Attributes:
        total: memory of the GPU.
        utilization: share of ``total`` that all workers on the GPU may use together.
        share: this worker's part of that: ``resources.gpus``.
        context, weights, activations, graphs: see :class:`DeviceMemoryUse`.
        kv: size of the KV cache.
        kv_blocks: number of its blocks.
    """

    weights: int
    kv: int
    kv_blocks: int
    total: int = 0
    utilization: float = 0.0
    share: float = 0.0
    context: int = 0
    activations: int = 0
    graphs: int = 0

    @property
    def usable(self) -> int:
        """Memory of the GPU that this worker may use."""
        return int(self.total * self.utilization * self.share)

    def describe(self) -> str:
        """The budget in one line."""
        kv = f"KV {_gib(self.kv)} ({self.kv_blocks} blocks)"
        if not self.total:
            return f"weights {_gib(self.weights)}, {kv}"
        return (
            f"total {_gib(self.total)} x utilization {self.utilization:g} x share {self.share:g} = {_gib(self.usable)}:"
            f" weights {_gib(self.weights)}, activations {_gib(self.activations)}, graphs {_gib(self.graphs)}, "
            f"context {_gib(self.context)}, {kv}"
        )


def divide_memory(
    use: DeviceMemoryUse, utilization: float, share: float, block_bytes: int, wanted_blocks: int | None = None
) -> MemoryBudget:
    """Sizes the KV cache of a worker on a GPU.

    Args:
        utilization: share of the GPU that all workers on it may use, in (0, 1].
        share: this worker's part of that, in (0, 1].
        block_bytes: size of a KV block over all layers.
        wanted_blocks: configured number of blocks, which may use this worker's share of the whole GPU. ``None`` takes
            what ``utilization`` leaves.

    Raises:
        ConfigError: the cache does not fit into the worker's share, or into what other processes leave free.
    """
    kept = use.context + use.weights + use.activations + use.graphs
    blocks = int(use.total * utilization * share - kept) // block_bytes if wanted_blocks is None else wanted_blocks
    most = int(use.total * share) - kept
    if blocks < MIN_BLOCKS or blocks * block_bytes > most:
        raise ConfigError(_does_not_fit(use, utilization, share, block_bytes, wanted_blocks))
    wanted = use.activations + use.graphs + blocks * block_bytes
    if wanted > use.free:
        others = use.total - use.free - use.context - use.weights
        raise ConfigError(
            f"The GPU has {_gib(use.total)}, of which {_gib(use.free)} are free after the weights, but this worker "
            f"needs {_gib(wanted)} more: {_parts(use)} and KV {_gib(blocks * block_bytes)}. Other processes hold about "
            f"{_gib(max(0, others))}. Stop them, or lower {_lower_first(wanted_blocks)}, chunk_tokens or max_num_seqs."
        )
    return MemoryBudget(
        weights=use.weights,
        kv=blocks * block_bytes,
        kv_blocks=blocks,
        total=use.total,
        utilization=utilization,
        share=share,
        context=use.context,
        activations=use.activations,
        graphs=use.graphs,
    )


def _does_not_fit(
    use: DeviceMemoryUse, utilization: float, share: float, block_bytes: int, wanted_blocks: int | None
) -> str:
    if wanted_blocks is None:
        allowed, name = use.total * utilization * share, f"engine.gpu_memory_utilization {utilization:g}"
        cache, lower, more = f"{_gib(MIN_BLOCKS * block_bytes)} at least", "", " or engine.gpu_memory_utilization"
    else:
        allowed, name = use.total * share, "all of it"
        cache, lower, more = _gib(wanted_blocks * block_bytes), "kv_blocks or kv_memory_gib, ", ""
    return (
        f"The KV cache does not fit on the GPU. This worker may use {_gib(allowed)}: {name} of {_gib(use.total)}, "
        f"times resources.gpus {share:g}. It has weights of {_gib(use.weights)} and needs {_parts(use)}, and a KV "
        f"cache of {cache}; {_gib(use.free)} of the GPU are free after the weights. Lower {lower}chunk_tokens or "
        "max_num_seqs, set engine.weights: fp8 or engine.cuda_graphs: off, or give the worker a "
        "larger share of a GPU with "
        f"resources.gpus{more}."
    )


def _parts(use: DeviceMemoryUse) -> str:
    return f"activations {_gib(use.activations)}, graphs {_gib(use.graphs)}, context {_gib(use.context)}"


def _lower_first(wanted_blocks: int | None) -> str:
    return "engine.gpu_memory_utilization" if wanted_blocks is None else "kv_blocks or kv_memory_gib"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
