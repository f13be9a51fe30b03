"""Runs requests through the synchronous engine, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import FinishReason, Request, SamplingParams, TokenOutput
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step.overlap import AheadRule, never
from baton.grammar.compiler import GrammarCompiler
from benchmarks.device_run.attention_world import poison

BLOCK_SIZE = 4
_MAX_STEPS = 20_000


@dataclass(slots=True)
class Outcome:
    """All outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None


def build_runner(
    model: PreTrainedModel,
    num_blocks: int = 512,
    block_size: int = BLOCK_SIZE,
    decoder: str = "auto",
    kv_cache: str = "native",
) -> ModelRunner:
    return ModelRunner(
        prepare_model(model, "float32"), num_blocks, block_size, RunnerOptions(decoder=decoder, kv_cache=kv_cache)
    )


def build_engine(
    runner: ModelRunner,
    *,
    chunk_tokens: int = 64,
    max_num_seqs: int = 64,
    num_blocks: int | None = None,
    prefix_caching: bool = True,
    runs_ahead: AheadRule = never,
) -> Engine:
    """An engine with an empty cache, filled with NaN, so that reads of unwritten KV are noticed."""
    poison(runner.cache)
    limits = SchedulerLimits(chunk_tokens, max_num_seqs, runner.loaded.max_model_len)
    blocks = BlockManager(num_blocks or runner.cache.num_blocks, runner.spec.block_size, prefix_caching=prefix_caching)
    return Engine(runner, Scheduler(limits, blocks), runs_ahead=runs_ahead)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    grammars: GrammarCompiler | None = None,
) -> list[Outcome]:
    """Sends all prompts at once and steps until every one is finished.

    Args:
        grammars: compiles those of the parameters.

    Raises:
        RuntimeError: the engine stopped making progress.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    outcomes = {f"request-{index}": Outcome() for index in range(len(prompts))}
    for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        request = Request(f"request-{index}", list(prompt), own, arrival_s=index)
        if own.grammar and grammars is not None:
            request.grammar = grammars.compile(own.grammar)
        engine.scheduler.add(request)
    for _ in range(_MAX_STEPS):
        if not engine.scheduler.has_work():
            return list(outcomes.values())
        for output in engine.step():
            outcomes[output.request_id].outputs.append(output)
            outcomes[output.request_id].token_ids.extend(output.token_ids)
        if not engine.last_step_ran:
            raise RuntimeError("requests are waiting, but nothing can be scheduled")
    raise RuntimeError(f"the engine was not done after {_MAX_STEPS} steps")


def run_tokens(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The greedy continuations of prompts."""
    return [outcome.token_ids for outcome in run(engine, prompts, greedy(num_tokens))]


def tokens_of(outcomes: Sequence[Outcome]) -> list[list[int]]:
    return [outcome.token_ids for outcome in outcomes]
