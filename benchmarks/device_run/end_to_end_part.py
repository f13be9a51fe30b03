"""Measures requests through the engine as in a worker, with and without steps that are launched ahead."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams
from baton.engine.async_engine import AsyncEngine
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.step.overlap import always, never
from benchmarks.device_run.part import Row, Setting
from benchmarks.device_run.random_model import DTYPES, make_model
from benchmarks.device_run.thread_samples import ThreadSampler

_BLOCK_SIZE = 16
_ENGINE_THREAD = "baton-engine"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all arrive at once."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        """For example ``64 x (128 -> 128)``."""
        return f"{self.num_requests} x ({self.prompt_tokens} -> {self.output_tokens})"

    @property
    def max_model_len(self) -> int:
        """The number of tokens for which a sequence needs room."""
        return self.prompt_tokens + self.output_tokens + 1


_LOADS = (Load(64, 128, 128), Load(256, 128, 64))
_TINY_LOADS = (Load(4, 8, 6), Load(6, 8, 4))


def run(setting: Setting) -> Iterator[Row]:
    """Measures the tokens per second of each load with overlap on and off, and samples the engine's thread."""
    loads = _TINY_LOADS if setting.is_tiny else _LOADS
    loaded = prepare_model(make_model(setting.shape, setting.device), DTYPES[setting.shape])
    max_requests = max(load.num_requests for load in loads)
    max_model_len = max(load.max_model_len for load in loads)
    num_blocks = 1 + max(load.num_requests * -(-load.max_model_len // _BLOCK_SIZE) for load in loads)
    runner = ModelRunner(loaded, num_blocks, _BLOCK_SIZE, RunnerOptions(decoder="transformers"))
    runner.capture_graphs(max_requests, 0, max_model_len)
    limits = SchedulerLimits(max(8192, max_requests), max_requests, max_model_len)
    profiles: list[Row] = []
    for load in loads:
        for overlap in (True, False):
            rows = asyncio.run(_measure(runner, limits, load, setting.seed, overlap=overlap))
            yield rows[0]
            profiles += rows[1:]
    yield from profiles


async def _measure(runner: ModelRunner, limits: SchedulerLimits, load: Load, seed: int, *, overlap: bool) -> list[Row]:
    """Measures one load after a short one for warm-up."""
    engine = AsyncEngine(runner, limits, prefix_caching=False, runs_ahead=always if overlap else never)
    engine.start()
    rng = random.Random(seed)
    try:
        await _answer(engine, Load(load.num_requests, load.prompt_tokens, 3), rng)
        started_s = time.perf_counter()
        with ThreadSampler(_ENGINE_THREAD) as sampler:
            counts, first_s = await _answer(engine, load, rng)
        took_s = time.perf_counter() - started_s
    finally:
        await engine.stop()
    name = f"{load.name}, overlap {'on' if overlap else 'off'}"
    num_tokens = sum(counts)
    steps_s = took_s - max(first_s)
    row: Row = {
        "name": name,
        "ok": counts == [load.output_tokens] * load.num_requests,
        "s": took_s,
        "tokens_per_s": num_tokens / took_s,
        "last_first_token_s": max(first_s),
        "tpot_ms": 1e3 * steps_s / max(1, load.output_tokens - 1),
    }
    return [row, *sampler.rows(name)]


async def _answer(engine: AsyncEngine, load: Load, rng: random.Random) -> tuple[list[int], list[float]]:
    """The number of tokens of each request, and the seconds until its first one."""
    vocab_size = engine.runner.loaded.vocab_size
    params = SamplingParams(max_tokens=load.output_tokens, temperature=0, ignore_eos=True)
    prompts = [[rng.randrange(vocab_size) for _ in range(load.prompt_tokens)] for _ in range(load.num_requests)]
    started_s = time.perf_counter()

    async def one(index: int, prompt: list[int]) -> tuple[int, float]:
        count, first_s = 0, 0.0
        async for output in engine.generate(Request(str(index), prompt, params)):
            first_s = first_s or time.perf_counter() - started_s
            count += len(output.token_ids)
        return count, first_s

    answers = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    return [count for count, _ in answers], [first_s for _, first_s in answers]
