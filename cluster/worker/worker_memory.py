"""Sizes a worker's KV cache: the configured size, or the memory left by the weights and the largest step."""

from __future__ import annotations

from dataclasses import replace

from baton.core.errors import ConfigError
from baton.core.kv_spec import KVCacheSpec
from baton.core.memory_budget import MIN_BLOCKS, DeviceMemoryUse, MemoryBudget, divide_memory
from baton.core.roles import DECODE, PREFILL
from baton.engine.contracts import DraftNetwork
from baton.engine.models.model_loader import LoadedModel
from baton.engine.runner.device_memory import CONTEXT_BYTES, SMALL_CACHE_BLOCKS, DeviceMemory, StepLimits, measure_use
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from cluster.config.config import BatonConfig
from cluster.config.worker_config import EngineConfig

_DEFAULT_CPU_KV_GIB = 1.0
_GIB = 2**30


def limit_memory(config: BatonConfig, pool: str, memory: DeviceMemory) -> None:
    """Limits a worker with a fraction of a GPU to its share of the memory. Call this before loading."""
    share = _share(config, pool)
    if share < 1:
        total, _ = memory.total_and_free()
        memory.limit(int(total * share) - CONTEXT_BYTES)


def plan_memory(
    config: BatonConfig,
    pool: str,
    loaded: LoadedModel,
    network: DraftNetwork | None,
    spec: KVCacheSpec,
    memory: DeviceMemory | None,
) -> MemoryBudget:
    """Sizes the KV cache of a worker whose weights are loaded.

    Args:
        network: the draft's network, if a draft is loaded.
        spec: layout of the cache, including the draft's layers.
        memory: memory of the GPU with the weights; ``None`` on a CPU.

    Raises:
        ConfigError: the configured cache does not fit, or no cache does.
    """
    block_bytes = spec.bytes_per_token * spec.block_size
    wanted = _configured_blocks(config, pool, spec)
    if memory is None:
        blocks = _blocks_in(_DEFAULT_CPU_KV_GIB, spec) if wanted is None else wanted
        return MemoryBudget(_weight_bytes(loaded), blocks * block_bytes, blocks)
    use = _measure(config, pool, loaded, network, spec, memory)
    return divide_memory(use, config.engine.gpu_memory_utilization, _share(config, pool), block_bytes, wanted)


def runner_options(engine: EngineConfig) -> RunnerOptions:
    """The configured options of every worker's runner."""
    return RunnerOptions(
        attention_backend=engine.attention_backend,
        decoder=engine.decoder,
        weights=engine.weights,
        cuda_graphs=engine.cuda_graphs,
        kv_cache=engine.kv_cache,
    )


def _measure(
    config: BatonConfig,
    pool: str,
    loaded: LoadedModel,
    network: DraftNetwork | None,
    spec: KVCacheSpec,
    memory: DeviceMemory,
) -> DeviceMemoryUse:
    total, _ = memory.total_and_free()
    max_cache_tokens = int(total * _share(config, pool)) // spec.bytes_per_token  # upper bound for any cache
    longest = min(config.max_model_len or loaded.max_model_len, loaded.max_model_len, max(2, max_cache_tokens))
    if loaded.group is not None:  # a draft's KV makes rank 0 differ
        longest = loaded.group.least(longest, loaded.model.device)
    engine = config.engine
    runner = ModelRunner(
        loaded,
        SMALL_CACHE_BLOCKS,
        engine.block_size,
        replace(runner_options(engine), cuda_graphs="off"),
        draft=network,
    )
    try:
        return measure_use(runner, _step_limits(config, pool, longest), memory)
    finally:
        runner.close()
        memory.release()


def _step_limits(config: BatonConfig, pool: str, max_model_len: int) -> StepLimits:
    """The limits of the pool's steps, or of both pools' steps where a worker may change its role and keep its cache."""
    names = (pool,) if config.role_change_obstacle() else (PREFILL, DECODE)
    pools = [config.pool(name) for name in names]
    drafts = config.speculation.method != "none" and DECODE in names
    return StepLimits(
        chunk_tokens=max(each.chunk_tokens for each in pools),
        max_num_seqs=max(min(each.max_num_seqs, each.chunk_tokens) for each in pools),
        max_draft_tokens=config.speculation.largest_draft if drafts else 0,
        max_model_len=max_model_len,
        records_graphs=DECODE in names and config.engine.cuda_graphs == "auto",
    )


def _share(config: BatonConfig, pool: str) -> float:
    """A rank's share of its GPU."""
    return min(1.0, config.pool(pool).resources.gpus or 1.0)


def _configured_blocks(config: BatonConfig, pool: str, spec: KVCacheSpec) -> int | None:
    own = config.pool(pool)
    if own.kv_blocks is not None or own.kv_memory_gib is None:
        return own.kv_blocks
    return _blocks_in(own.kv_memory_gib, spec)


def _blocks_in(gib: float, spec: KVCacheSpec) -> int:
    blocks = int(gib * _GIB // (spec.bytes_per_token * spec.block_size))
    if blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{gib:.2f} GiB hold {blocks} KV blocks of {spec.block_size} tokens at {spec.bytes_per_token} bytes per "
            f"token; at least {MIN_BLOCKS} are needed. Raise kv_memory_gib or set kv_blocks."
        )
    return blocks


def _weight_bytes(loaded: LoadedModel) -> int:
    """The bytes of the model's tensors, each counted once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*loaded.model.parameters(), *loaded.model.buffers())}
    return sum(tensors.values())
