"""Loads a worker's model, its draft and its cache, in the worker's process and in those of its other ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import KVEncoding
from baton.core.logs import configure_logging
from baton.core.memory_budget import MemoryBudget
from baton.core.roles import DECODE
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.draft.loading import LoadedDraft, load_draft
from baton.engine.kv_cache.paged_cache import Allocator
from baton.engine.models.empty_model import empty_model
from baton.engine.models.model_loader import check_architecture, load_config, pick_dtype
from baton.engine.models.model_source import ModelSource, resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.engine.parallel.followers import Followers
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.plan import make_plan
from baton.engine.runner.device_memory import CudaMemory
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.self_check import check_encoding, check_model
from baton.engine.runner.served_model import load_served_model
from baton.grammar.compiler import GrammarCompiler
from baton.process.cores import usable_cores
from cluster.config.config import BatonConfig
from cluster.worker.worker_memory import limit_memory, plan_memory, runner_options

logger = logging.getLogger(__name__)

_BUILDER = f"{__name__}:build_follower"


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """What a worker has loaded.

    Attributes:
        config: the configuration, changed where a check of the model demands it.
        draft: on rank 0 only.
        grammars: has read the vocabulary, on rank 0.
    """

    config: BatonConfig
    source: ModelSource
    runner: ModelRunner
    draft: LoadedDraft | None
    grammars: GrammarCompiler
    memory: MemoryBudget


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a follower needs to build its runner."""

    worker_id: str
    config: dict[str, object]
    pool: str


def load_with_followers(task: RankTask, config: BatonConfig, followers: Followers, device: torch.device) -> WorkerModel:
    """Like :func:`load_worker_model`, for a model that this process and its followers share.

    Raises:
        DeviceLostError: a follower failed.
        UnsupportedModelError: the model cannot be divided among so many ranks; none has been started then.
    """
    check_degree(config, followers.size, device)
    group = followers.start(_BUILDER, task, device)
    model = load_worker_model(config, task.pool, device, group)
    model.runner.lead(followers)
    return model


def check_degree(config: BatonConfig, size: int, device: torch.device) -> None:
    """Raises :class:`UnsupportedModelError` for a model that ``size`` ranks cannot share, by its config alone."""
    found = load_config(resolve_model(config.model))
    check_architecture(found)
    dtype = TORCH_DTYPES[pick_dtype(config.dtype, found, device, config.engine.weights)]
    make_plan(empty_model(found, dtype), size)


def build_follower(task: RankTask, group: RankGroup, device: torch.device, allocate: Allocator) -> ModelRunner:
    """Does in a follower what :func:`load_worker_model` does in rank 0 at the same time."""
    config = BatonConfig.from_dict(dict(task.config))
    configure_logging(config.log, f"{task.worker_id}/{group.rank}")
    return load_worker_model(config, task.pool, device, group, allocate).runner


def load_worker_model(
    config: BatonConfig,
    pool: str,
    device: torch.device,
    group: RankGroup | None = None,
    allocate: Allocator | None = None,
) -> WorkerModel:
    """Loads what a worker of ``pool`` needs. All ranks call this at the same time.

    Raises:
        BatonError: the model cannot be loaded or cannot run here.
    """
    engine = config.engine
    torch.set_num_threads(engine_threads(engine.threads, device, config.pool(pool).num_ranks))
    source = resolve_model(config.model)
    memory = CudaMemory(device) if device.type == "cuda" else None
    if memory is not None:
        limit_memory(config, pool, memory)
    loaded = load_served_model(source, config.dtype, device, engine.weights, engine.decoder, group)
    runs_draft = pool == DECODE or config.speculation.draft_on_prefill
    draft = None
    if runs_draft:
        wanted = config.speculation.wanted_draft
        draft = load_draft(config.speculation.draft, config.model, source.path, loaded, wanted)
    if group is not None and group.rank:
        draft = None  # it was needed only because drafts read the target, which takes all ranks
    network = None if draft is None else draft.network
    spec = loaded.kv_spec(engine.block_size, encoding=KVEncoding(engine.kv_cache))
    if network is not None:
        spec = spec.with_draft("", network.layer_specs)
    budget = plan_memory(config, pool, loaded, network, spec, memory)
    if group is not None:
        budget = replace(budget, kv_blocks=group.least(budget.kv_blocks, device))
    logger.info("memory: %s", budget.describe())
    runner = ModelRunner(
        loaded, budget.kv_blocks, engine.block_size, runner_options(engine), draft=network, allocate=allocate
    )
    logger.info("the model is loaded")
    if engine.self_check:
        check_model(runner)
        logger.info("the self-check is passed")
        config = with_checked_encoding(config, runner)
    grammars = GrammarCompiler(lambda: Tokenizer.load(source.path).to_json(), loaded.vocab_size, loaded.eos_token_ids)
    if group is None or not group.rank:
        grammars.load()
    return WorkerModel(config, source, runner, draft, grammars, budget)


def engine_threads(configured: int | None, device: torch.device, num_ranks: int = 1) -> int:
    """CPU threads of a rank. On a GPU one is enough, since the engine copies only small tables on the CPU."""
    return configured or (max(1, usable_cores() // num_ranks) if device.type == "cpu" else 1)


def with_checked_encoding(config: BatonConfig, runner: ModelRunner) -> BatonConfig:
    """Checks int8 KV with this model. Where its error is too large, replaces ``kv_transfer.encoding: auto`` by native.

    Raises:
        UnsupportedModelError: the error is too large, and int8 is configured.
    """
    kv = config.kv_transfer
    if kv.encoding == "native":
        return config
    try:
        check_encoding(runner, KVEncoding.INT8)
    except UnsupportedModelError as error:
        if kv.encoding != "auto":
            raise
        logger.warning("KV is not sent as int8: %s", error.message)
        return config.model_copy(update={"kv_transfer": kv.model_copy(update={"encoding": "native"})})
    return config
