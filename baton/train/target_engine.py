"""An engine that answers training prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import ConfigError
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import LoadedModel
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.scheduler import Scheduler
from baton.train.collect import CollectSettings

_BLOCK_SIZE = 16
_CHUNK_TOKENS = 512
_GPU_MEMORY_FOR_KV = 0.85


@contextmanager
def answering_engine(target: LoadedModel, settings: CollectSettings) -> Iterator[Engine]:
    """An engine whose cache holds all concurrent conversations, or fewer if the GPU's memory is too small.

    The memory is freed at the end of the context.

    Raises:
        ConfigError: prompt and answer do not fit into the model's context, or the GPU's memory is too small for one
            conversation.
    """
    longest = settings.max_prompt_tokens + settings.max_answer_tokens
    if longest > target.max_model_len:
        raise ConfigError(
            f"training data: prompts of {settings.max_prompt_tokens} tokens and answers of "
            f"{settings.max_answer_tokens} do not fit into the model's context of {target.max_model_len} tokens."
        )
    runner = ModelRunner(target, _num_blocks(target, longest, settings.batch_size), _BLOCK_SIZE)
    try:
        limits = SchedulerLimits(max(_CHUNK_TOKENS, settings.batch_size), settings.batch_size, target.max_model_len)
        yield Engine(runner, Scheduler(limits, BlockManager(runner.cache.num_blocks, _BLOCK_SIZE)))
    finally:
        runner.close()
        if target.model.device.type == "cuda":
            torch.cuda.empty_cache()


def _num_blocks(target: LoadedModel, longest: int, batch_size: int) -> int:
    of_one = -(-longest // _BLOCK_SIZE)
    wanted = 1 + batch_size * of_one
    if target.model.device.type != "cuda":
        return wanted
    free = torch.cuda.mem_get_info(target.model.device)[0] * _GPU_MEMORY_FOR_KV
    possible = int(free // (target.kv_spec(_BLOCK_SIZE).bytes_per_token * _BLOCK_SIZE))
    if possible <= of_one:
        raise ConfigError(
            f"training data: the GPU has {free / 2**30:.2f} GiB for KV, which is too little for one conversation of "
            f"{longest} tokens. Lower --max-answer-tokens, or use a GPU with more free memory."
        )
    return min(wanted, possible)
