"""A short run of made-up requests when a worker starts: what its steps cost is known before the first real one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from engine.async_engine import AsyncEngine, generate_all
from engine.request import Request, SamplingParams

PROFILE_BUDGET_S = 0.7
_ROUNDS = 2
_GROWTH = 1.5
"""How much longer than in proportion to its size the next run may take."""


@dataclass(frozen=True, slots=True)
class _Run:
    """``batch`` requests at once, each of so many prompt and output tokens."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def size(self) -> int:
        """Rows of its forwards, in which steps of few rows count as much as those of 16."""
        return max(16, self.batch * self.prompt_tokens) + (self.output_tokens - 1) * max(16, self.batch)


# Small ones first: where time is short, they are what is measured.
_RUNS = (
    _Run(1, 16, 4),
    _Run(1, 64, 2),
    _Run(4, 2, 4),
    _Run(1, 128, 2),
    _Run(16, 2, 3),
    _Run(1, 256, 2),
    _Run(1, 512, 2),
)


async def profile_steps(engine: AsyncEngine, max_model_len: int, budget_s: float = PROFILE_BUDGET_S) -> None:
    """Runs requests through a started engine that serves nobody yet. Step samples are all that it leaves behind.

    Args:
        budget_s: no run begins that would probably end after it.

    Raises:
        BatonError: the engine failed.
    """
    started_s = time.monotonic()
    slowest_s_per_row = 0.0
    async with engine.unrecorded():
        for index in range(_ROUNDS * len(_RUNS)):
            run = _RUNS[index % len(_RUNS)]
            elapsed_s = time.monotonic() - started_s
            if not _fits(engine, run, max_model_len):
                continue
            if elapsed_s + _GROWTH * slowest_s_per_row * run.size > budget_s:
                continue
            await _execute(engine, run, f"profile-{index}")
            slowest_s_per_row = (time.monotonic() - started_s - elapsed_s) / run.size


def _fits(engine: AsyncEngine, run: _Run, max_model_len: int) -> bool:
    length = run.prompt_tokens + run.output_tokens
    room = engine.blocks.pool.num_blocks // max(1, engine.blocks.num_blocks_for(length))
    limits = engine.scheduler.limits
    return length <= max_model_len and run.batch <= min(room, limits.max_num_seqs, limits.chunk_tokens)


async def _execute(engine: AsyncEngine, run: _Run, name: str) -> None:
    params = SamplingParams(max_tokens=run.output_tokens, temperature=0, ignore_eos=True)
    vocab_size = engine.runner.loaded.vocab_size
    requests = [
        Request(
            request_id=f"{name}-{index}",
            prompt_token_ids=[(7 * position + index) % vocab_size for position in range(run.prompt_tokens)],
            params=params,
            eos_token_ids=engine.runner.loaded.eos_token_ids,
            speculation_method="none",
        )
        for index in range(run.batch)
    ]
    await asyncio.gather(*(generate_all(engine, request) for request in requests))
