"""Step samples: attention of prompts and context of decoding."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import InternalError
from baton.core.request import Request
from baton.core.steps import StepProgress
from baton.engine.async_engine import AsyncEngine, generate_all
from baton.engine.profile import profile_steps
from tests.engine_runs import build_engine, build_runner, greedy, run
from tests.observers import SeenSteps
from tests.tiny_models import tiny_model
from tests.waiting import until


def test_prompt_chunks_and_decode_steps_are_sampled() -> None:
    engine, seen = build_engine(build_runner(tiny_model("llama"), num_blocks=64), chunk_tokens=8), SeenSteps()
    engine.subscribe(seen)
    run(engine, [list(range(1, 21))], greedy(3))
    chunks, decodes = seen.samples[:3], seen.samples[3:]
    assert [chunk.prompt_tokens for chunk in chunks] == [8, 8, 4]
    assert sum(chunk.attention_pairs for chunk in chunks) == 20 * 21 // 2  # however it is cut
    assert [(step.decoding, step.context_tokens) for step in decodes] == [(1, 21), (1, 22)]
    assert all(step.ms > 0 and step.sequences == 1 and step.drafted_tokens == 0 for step in chunks + decodes)


def test_a_batch_is_one_sample() -> None:
    engine, seen = build_engine(build_runner(tiny_model("llama"), num_blocks=64)), SeenSteps()
    engine.subscribe(seen)
    run(engine, [[1, 2, 3], [4, 5, 6, 7]], greedy(2))
    prompts, decode = seen.samples
    assert (prompts.sequences, prompts.prompt_tokens, prompts.decoding) == (2, 7, 0)
    assert (decode.sequences, decode.decoding, decode.context_tokens) == (2, 2, 4 + 5)


@pytest.fixture
def seen() -> SeenSteps:
    return SeenSteps()


@pytest.fixture
async def engine(seen: SeenSteps):
    engine = AsyncEngine(build_runner(tiny_model("llama"), num_blocks=64), SchedulerLimits(64, 8, 128))
    engine.subscribe(seen)
    engine.start()
    yield engine
    await engine.stop()


async def test_a_profile_leaves_nothing_but_samples(engine: AsyncEngine, seen: SeenSteps) -> None:
    await profile_steps(engine, max_model_len=128, budget_s=5.0)
    assert max(sample.prompt_tokens for sample in seen.samples) >= 64
    assert max(sample.decoding for sample in seen.samples) >= 4
    stats = await engine.stats()
    # A step that took far too long counts only once others confirm it.
    assert 0 < stats.step_costs.num_samples <= len(seen.samples)
    assert (stats.num_steps, stats.num_prefill_tokens, stats.num_generated_tokens, stats.num_running) == (0, 0, 0, 0)
    assert (stats.blocks.used, stats.blocks.cached, stats.num_leaked_blocks) == (0, 0, 0)
    # Prefixes of real requests are cached again.
    await generate_all(engine, Request("a", list(range(1, 30)), greedy(2)))
    assert (await engine.stats()).blocks.cached > 0


async def test_a_profile_without_time_measures_only_the_smallest_run(engine: AsyncEngine, seen: SeenSteps) -> None:
    await profile_steps(engine, max_model_len=128, budget_s=0.0)
    assert [sample.prompt_tokens for sample in seen.samples if sample.prompt_tokens] == [16, 16]


async def test_a_profile_skips_runs_that_do_not_fit(seen: SeenSteps) -> None:
    engine = AsyncEngine(build_runner(tiny_model("llama"), num_blocks=5), SchedulerLimits(8, 8, 20))
    engine.subscribe(seen)
    engine.start()
    try:
        await profile_steps(engine, max_model_len=20, budget_s=5.0)
        assert {sample.sequences for sample in seen.samples} == {1}
    finally:
        await engine.stop()


async def test_the_progress_shows_a_step_that_hangs(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    await profile_steps(engine, max_model_len=128, budget_s=0.0)
    before = engine.progress()
    assert (before.step_age_s, before.expected_step_s) == (0.0, 0.0)
    held, released = threading.Event(), threading.Event()
    forward = engine.runner.forward

    def hang(batch: Any) -> Any:
        held.set()
        released.wait()
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", hang)
    running = asyncio.create_task(generate_all(engine, Request("a", list(range(1, 30)), greedy(1))))
    await asyncio.to_thread(held.wait)
    first, second = engine.progress(), engine.progress()
    assert first.num_steps == before.num_steps
    assert 0 < first.step_age_s < second.step_age_s
    assert first.expected_step_s > 0
    released.set()
    await running
    assert engine.progress() == StepProgress(before.num_steps + 1)


async def test_failed_steps_are_progress(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: Any) -> Any:
        raise ValueError("bad")

    monkeypatch.setattr(engine.runner, "forward", fail)
    with pytest.raises(InternalError):
        await generate_all(engine, Request("a", [1, 2, 3], greedy(1)))
    assert engine.progress() == StepProgress(1)


async def test_a_probe_makes_one_step_of_which_nothing_is_learned(engine: AsyncEngine, seen: SeenSteps) -> None:
    await engine.probe()
    await engine.probe()
    assert engine.progress() == StepProgress(2)
    assert seen.samples == []
    stats = await engine.stats()
    assert (stats.step_costs.num_samples, stats.blocks.used, stats.blocks.cached) == (0, 0, 0)


async def test_a_probe_of_an_engine_whose_requests_wait_computes_nothing(engine: AsyncEngine) -> None:
    blocks = await engine.call(lambda: engine.blocks.pool.allocate(64))
    waiting = asyncio.create_task(generate_all(engine, Request("a", [1, 2, 3], greedy(1))))
    await until(lambda: engine.call(engine.scheduler.has_work))
    await engine.probe()
    assert engine.progress() == StepProgress(0)
    await engine.call(lambda: engine.blocks.pool.release(blocks))  # which also wakes the thread up
    assert len(await waiting) == 1
