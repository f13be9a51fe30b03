"""The model under test, its draft, and engines with both, in one process, assembled as on a decode worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import ConfigError
from baton.core.kv_spec import KVEncoding
from baton.engine.draft.loading import LoadedDraft, load_draft
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import LoadedModel, pick_device
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.engine.profile import DRAFT_RUNS, synthetic_requests
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.served_model import load_served_model
from baton.engine.scheduling.scheduler import Scheduler
from baton.process.cores import usable_cores
from benchmarks.speculation_rounds import RoundMeter
from benchmarks.speculation_runs import run_batch
from cluster.config.config import BatonConfig
from decode_worker.speculation.controller import NONE, SpeculationController
from decode_worker.speculation.registry import assemble_speculation, method_names

_MAX_PREFILL_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded model with its draft, before the size of its cache is known."""

    config: BatonConfig
    loaded: LoadedModel
    tokenizer: Tokenizer
    draft: LoadedDraft | None

    def runner(self, num_blocks: int, *, with_draft: bool = True) -> ModelRunner:
        """A runner of the model with a cache of ``num_blocks`` blocks and the engine's settings."""
        engine = self.config.engine
        draft = self.draft if with_draft else None
        return ModelRunner(
            self.loaded,
            num_blocks,
            engine.block_size,
            RunnerOptions(
                attention_backend=engine.attention_backend,
                decoder=engine.decoder,
                weights=engine.weights,
                cuda_graphs=engine.cuda_graphs,
                kv_cache=engine.kv_cache,
            ),
            draft=None if draft is None else draft.network,
        )


@dataclass(frozen=True, slots=True)
class SpeculativeEngine:
    """An engine with one method, and its meter.

    Attributes:
        meter: the engine's proposer, which wraps ``controller``.
    """

    engine: Engine
    controller: SpeculationController
    meter: RoundMeter

    def profile(self) -> None:
        """Lets the engine learn costs as a decode worker does at its start, and nothing else."""
        loaded, network = self.engine.runner.loaded, self.controller.network_method
        with self.controller.profiling():
            for method in (NONE, network) if network else (NONE,):
                for index, (batch, length) in enumerate(DRAFT_RUNS):
                    requests = synthetic_requests(loaded, f"profile-{method}-{index}", batch, 2, length, method)
                    run_batch(self.engine, requests, self.meter)


def load_target(config: BatonConfig) -> Target:
    """Loads the configured model and draft, and sets torch's number of threads.

    Raises:
        BatonError: the model or the draft cannot be found or used; the message says why.
    """
    torch.set_num_threads(config.engine.threads or usable_cores())
    source = resolve_model(config.model)
    loaded = load_served_model(
        source, config.dtype, pick_device(config.engine.device), config.engine.weights, config.engine.decoder
    )
    speculation = config.speculation
    draft = load_draft(speculation.draft, config.model, source.path, loaded, speculation.wanted_draft)
    return Target(config, loaded, Tokenizer.load(source.path), draft)


def _check_room(target: Target, num_blocks: int, batch: int) -> None:
    """Checks the memory for two caches, one of which includes the draft's layers."""
    engine, draft = target.config.engine, target.draft
    spec = target.loaded.kv_spec(engine.block_size, engine.weights, KVEncoding(engine.kv_cache))
    whole = spec if draft is None else spec.with_draft("", draft.network.layer_specs)
    needed = num_blocks * engine.block_size * (spec.bytes_per_token + whole.bytes_per_token)
    free = _free_memory(target.loaded.model.device)
    if needed > free:
        raise ConfigError(
            f"{batch} sequences at once need two KV caches of {needed / 2**30:.1f} GiB together, but only "
            f"{free / 2**30:.1f} GiB of memory are free. Give smaller --batches, a lower --max-tokens or shorter "
            "--prompts."
        )


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


class EngineFactory:
    """Builds engines. Speculative engines share one cache, so only one of them may have requests at a time; the plain
    engine has its own cache and no draft.

    Args:
        batch: maximum number of concurrent sequences.
        prompt_tokens: length of the longest prompt.
        max_tokens: maximum length of each answer.

    Raises:
        ConfigError: prompt and answer exceed the model's context, or the free memory is too small.
    """

    def __init__(self, target: Target, batch: int, prompt_tokens: int, max_tokens: int) -> None:
        config, loaded = target.config, target.loaded
        longest = prompt_tokens + max_tokens
        if longest > loaded.max_model_len:
            raise ConfigError(
                f"The longest prompt has {prompt_tokens} tokens; with {max_tokens} to generate it does not fit into "
                f"the model's context of {loaded.max_model_len}. Lower --max-tokens, or give shorter --prompts."
            )
        self._config = config
        self._draft = target.draft
        speculation = config.speculation
        self._max_draft_tokens = speculation.largest_draft
        num_blocks = 1 + batch * -(-(longest + self._max_draft_tokens) // config.engine.block_size)
        _check_room(target, num_blocks, batch)
        self._runner = target.runner(num_blocks)
        self._plain_runner = target.runner(num_blocks, with_draft=False)
        # All prompts in one step, within a limit, so that no decoding sequence waits for another's prefill.
        chunk_tokens = min(batch * prompt_tokens, _MAX_PREFILL_TOKENS)
        self._limits = SchedulerLimits(max(chunk_tokens, config.decode.chunk_tokens), batch, loaded.max_model_len)

    def plain(self) -> Engine:
        """An engine without speculation."""
        return Engine(self._plain_runner, self._scheduler())

    def speculative(self, method: str) -> SpeculativeEngine:
        """An engine with a method as the default of its requests.

        Raises:
            ConfigError: the method is unknown or needs another draft.
        """
        # The benchmark repeats its prompts, so with remembered outputs it would only measure memory.
        config = self._config.speculation.model_copy(update={"remember_outputs": False})
        speculation = assemble_speculation(config, self._runner, self._draft, default=method)
        controller = speculation.controller
        meter = RoundMeter(controller, controller.drafted_by, lambda: controller.num_drafted)
        engine = Engine(
            self._runner,
            self._scheduler(),
            speculation.verifier,
            meter,
            max_draft_tokens=speculation.max_draft_tokens,
            costs=controller.costs,
        )
        return SpeculativeEngine(engine, controller, meter)

    def choose_methods(self, wanted: Sequence[str]) -> tuple[dict[str, SpeculativeEngine], dict[str, str]]:
        """An engine for each method, by name.

        Args:
            wanted: names of methods; empty means every method that can run here.

        Returns:
            The engines, and the reasons why unnamed methods cannot run.

        Raises:
            ConfigError: a named method cannot run here.
        """
        engines: dict[str, SpeculativeEngine] = {}
        left_out: dict[str, str] = {}
        for name in wanted or [name for name in method_names() if name != NONE]:
            try:
                engines[name] = self.speculative(name)
            except ConfigError as error:
                if wanted:
                    raise
                left_out[name] = error.message
        return engines, left_out

    def _scheduler(self) -> Scheduler:
        blocks = BlockManager(self._runner.cache.num_blocks, self._runner.spec.block_size, prefix_caching=False)
        return Scheduler(self._limits, blocks)
