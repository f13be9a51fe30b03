"""Profiles a worker at its start with synthetic requests, so that step costs are known before the first real one.

Every kind of run executes once unmeasured, to compile kernels and load libraries. The same runs are then measured,
round after round, while there is time. The engine learns from them at the end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.request import Request, SamplingParams
from baton.core.step_costs import StepSample
from baton.engine.async_engine import AsyncEngine, generate_all
from baton.engine.models.model_loader import LoadedModel

CPU_BUDGET_S = 0.7
GPU_BUDGET_S = 2.0
_CPU_ROUNDS = 2
_GPU_ROUNDS = 4
_SMALLEST_PROMPT = 16
_PROMPT_GROWTH = 2
_BATCH_GROWTH = 4
_BATCH_PROMPT = 2
_BATCH_OUTPUT = 4
_PROMPT_OUTPUT = 2
_UNCONDITIONAL_RUNS = 2
"""Runs that are measured however long they take; a single one could be an outlier that nothing reveals."""
_TIME_GROWTH = 1.5
"""The next run may take this much longer than in proportion to its size."""
DRAFT_RUNS = ((1, 6), (1, 16), (_BATCH_GROWTH, 8))
"""Sequences and output tokens of the runs with drafts; the first one is not measured."""
_GATHERING_S = 1.0


@dataclass(frozen=True, slots=True)
class _Run:
    """``batch`` simultaneous requests with ``prompt_tokens`` and ``output_tokens`` each."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def size(self) -> int:
        """Rows of its forwards; a step of fewer than 16 rows counts as 16."""
        return max(16, self.batch * self.prompt_tokens) + (self.output_tokens - 1) * max(16, self.batch)


async def profile_steps(
    engine: AsyncEngine, max_model_len: int, budget_s: float | None = None, draft_method: str | None = None
) -> None:
    """Runs requests through a started engine that serves nothing yet. Only step samples remain afterwards.

    Args:
        budget_s: a measured run that would probably end after this many seconds is skipped, except the two smallest;
            ``None`` takes :data:`CPU_BUDGET_S` or :data:`GPU_BUDGET_S`.
        draft_method: a speculation method that drafts for some more runs, so that the costs of its drafts are known
            too. How many of them are accepted says nothing about real texts; the caller must see to it that the method
            does not learn it.

    Raises:
        BatonError: the engine failed.
    """
    on_cpu = engine.runner.device.type == "cpu"
    runs = sorted(_runs_for(engine, max_model_len), key=lambda run: run.size)
    async with engine.unrecorded() as learned:
        # The fused decoder is compiled already; on a GPU each size may need kernels of its own.
        for index, run in enumerate(runs[:1] if on_cpu else runs):
            await _execute(engine, run, f"warm-up-{index}")
        await engine.take_steps()
        if budget_s is None:
            budget_s = CPU_BUDGET_S if on_cpu else GPU_BUDGET_S
        await _measure(engine, [*runs[:1], *runs * (_CPU_ROUNDS if on_cpu else _GPU_ROUNDS)], budget_s)
        learned += await engine.take_steps()
        if draft_method is not None:
            learned += await _measure_drafts(engine, max_model_len, draft_method)


async def _measure_drafts(engine: AsyncEngine, max_model_len: int, method: str) -> list[StepSample]:
    """The steps of some runs with drafts, as ones in which nothing was decoded, so that they count for costs alone."""
    runs = [_Run(batch, _BATCH_PROMPT, output) for batch, output in DRAFT_RUNS]
    for index, run in enumerate(runs):
        if _fits(engine, run, max_model_len):
            await _execute(engine, run, f"drafts-{index}", method)
        if index == 0:
            await engine.take_steps()
    return [sample._replace(decoding=0) for sample in await engine.take_steps()]


async def _measure(engine: AsyncEngine, runs: list[_Run], budget_s: float) -> None:
    """Executes the runs that probably fit into the budget."""
    started_s = time.monotonic()
    s_per_row = 0.0
    for index, run in enumerate(runs):
        begun_s = time.monotonic()
        probably_ended_s = begun_s + _TIME_GROWTH * s_per_row * run.size
        if index >= _UNCONDITIONAL_RUNS and probably_ended_s - started_s > budget_s:
            continue
        await _execute(engine, run, f"profile-{index}")
        s_per_row = (time.monotonic() - begun_s) / run.size


def _runs_for(engine: AsyncEngine, max_model_len: int) -> Iterator[_Run]:
    """Prompts up to ``chunk_tokens`` and batches up to ``max_num_seqs``, as far as the cache has room."""
    limits = engine.scheduler.limits
    longest = max_model_len - _PROMPT_OUTPUT
    for num_tokens in _ladder(_SMALLEST_PROMPT, limits.chunk_tokens, _PROMPT_GROWTH):
        batch = -(-num_tokens // max(1, longest))  # several prompts, since one must not exceed max_model_len
        run = _Run(batch, num_tokens // batch, _PROMPT_OUTPUT)
        if _fits(engine, run, max_model_len):
            yield run
    for batch in _ladder(1, min(limits.max_num_seqs, limits.chunk_tokens), _BATCH_GROWTH):
        run = _Run(batch, _BATCH_PROMPT, _BATCH_OUTPUT)
        if _fits(engine, run, max_model_len):
            yield run


def _ladder(smallest: int, largest: int, growth: int) -> Iterator[int]:
    value = smallest
    while value < largest:
        yield value
        value *= growth
    yield largest


def _fits(engine: AsyncEngine, run: _Run, max_model_len: int) -> bool:
    length = run.prompt_tokens + run.output_tokens
    room = engine.blocks.pool.num_blocks // max(1, engine.blocks.num_blocks_for(length))
    limits = engine.scheduler.limits
    return 0 < length <= max_model_len and run.batch <= min(room, limits.max_num_seqs, limits.chunk_tokens)


async def _execute(engine: AsyncEngine, run: _Run, name: str, method: str = "none") -> None:
    requests = synthetic_requests(engine.runner.loaded, name, run.batch, run.prompt_tokens, run.output_tokens, method)
    gathered = threading.Event()  # the engine waits for it, so that its first step contains all requests
    engine.post(lambda: gathered.wait(_GATHERING_S))
    tasks = [asyncio.create_task(generate_all(engine, request)) for request in requests]
    await asyncio.sleep(0)
    gathered.set()
    await asyncio.gather(*tasks)


def synthetic_requests(
    loaded: LoadedModel, name: str, batch: int, prompt_tokens: int, output_tokens: int, method: str
) -> list[Request]:
    """Greedy requests without meaning, all of the same size.

    Args:
        name: begins their ids.
        batch: how many.
        method: their speculation method.
    """
    params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    return [
        Request(
            request_id=f"{name}-{index}",
            prompt_token_ids=[(7 * position + index) % loaded.vocab_size for position in range(prompt_tokens)],
            params=params,
            eos_token_ids=loaded.eos_token_ids,
            speculation_method=method,
        )
        for index in range(batch)
    ]
