"""Settings of a simulated worker, from the cluster's configuration and a profile."""

from __future__ import annotations

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import ConfigError
from baton.core.roles import POOLS
from baton.engine.scheduling.ordering import ArrivalOrder, EarliestDeadlineFirst
from cluster.config.config import BatonConfig
from cluster.simulation.profile import TimingProfile
from cluster.simulation.worker import WorkerSettings

_VOCAB_SIZE = 32_000


def worker_settings(
    config: BatonConfig,
    profile: TimingProfile,
    worker_id: str,
    pool: str,
    *,
    with_steps: bool = True,
    vocab_size: int = _VOCAB_SIZE,
    eos_token_ids: tuple[int, ...] = (2,),
    model_name: str = "",
    hash_key: bytes = b"",
) -> WorkerSettings:
    """Builds the settings of a worker.

    Args:
        with_steps: whether messages describe their steps.
        hash_key: key of the cluster's block hashes; empty without processes.
        vocab_size, eos_token_ids: values of the tokenizer that shows the tokens as text.

    Raises:
        ConfigError: ``max_model_len`` is more than the worker's KV cache holds.
    """
    pool_config, block_size = config.pool(pool), config.engine.block_size
    num_blocks = pool_config.kv_blocks or max(2, profile.kv_tokens // block_size)
    capacity = num_blocks * block_size
    wanted = config.max_model_len
    if wanted is not None and wanted > capacity:
        raise ConfigError(
            f"max_model_len is {wanted}, but a simulated {pool} worker's KV cache holds {capacity} tokens. "
            f"Lower max_model_len, or raise {pool}.kv_blocks or the profile's kv_tokens."
        )
    return WorkerSettings(
        worker_id=worker_id,
        pool=pool,
        profile=profile,
        limits=SchedulerLimits(
            pool_config.chunk_tokens, pool_config.max_num_seqs, wanted or min(profile.max_model_len, capacity)
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        model_name=next(iter(config.served_model_names), model_name or f"simulated-{profile.model}"),
        ordering=ArrivalOrder() if config.prefill.ordering == "fcfs" else EarliestDeadlineFirst(),
        prefix_caching=config.engine.prefix_caching,
        hash_key=hash_key,
        tokens_per_message=config.simulation.tokens_per_message,
        with_steps=with_steps,
        reserve_timeout_s=config.kv_transfer.reserve_timeout_s,
        claim_timeout_s=config.kv_transfer.claim_timeout_s,
        seed=config.simulation.seed,
    )


def longest_request(config: BatonConfig, profile: TimingProfile) -> int:
    """The largest number of prompt and answer tokens that workers of both pools take.

    Raises:
        ConfigError: as :func:`worker_settings`.
    """
    return min(worker_settings(config, profile, pool, pool).limits.max_model_len for pool in POOLS)
