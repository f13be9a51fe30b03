"""Step samples: attention of prompts, context of decoding, and the ring that keeps the samples."""

from __future__ import annotations

import pytest

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request
from baton.core.step_samples import StepSample, StepSamples
from baton.engine.async_engine import AsyncEngine, generate_all
from baton.engine.profile import profile_steps
from tests.engine_runs import build_engine, build_runner, greedy, run
from tests.tiny_models import tiny_model


def sample(ms: float) -> StepSample:
    return StepSample(ms, 0, 0, 1, 1, 5, 0, 0)


def test_readers_get_only_new_samples() -> None:
    samples = StepSamples(capacity=3)
    for ms in (1.0, 2.0):
        samples.add(sample(ms))
    assert [found.ms for found in samples.after(0)] == [1.0, 2.0]
    assert [found.ms for found in samples.after(1)] == [2.0]
    assert samples.after(2) == []
    assert samples.last_index == 2


def test_a_late_reader_misses_only_the_oldest_samples() -> None:
    samples = StepSamples(capacity=3)
    for ms in (1.0, 2.0, 3.0, 4.0, 5.0):
        samples.add(sample(ms))
    assert [found.ms for found in samples.after(0)] == [3.0, 4.0, 5.0]
    assert [found.ms for found in samples.after(4)] == [5.0]
    assert samples.after(99) == []  # of a worker that had the same name before


def test_prompt_chunks_and_decode_steps_are_sampled() -> None:
    engine = build_engine(build_runner(tiny_model("llama"), num_blocks=64), chunk_tokens=8)
    run(engine, [list(range(1, 21))], greedy(3))
    chunks, decodes = engine.meter.samples.after(0)[:3], engine.meter.samples.after(0)[3:]
    assert [chunk.prompt_tokens for chunk in chunks] == [8, 8, 4]
    assert sum(chunk.attention_pairs for chunk in chunks) == 20 * 21 // 2  # however it is cut
    assert [(step.decoding, step.context_tokens) for step in decodes] == [(1, 21), (1, 22)]
    assert all(step.ms > 0 and step.sequences == 1 and step.drafted_tokens == 0 for step in chunks + decodes)


def test_a_batch_is_one_sample() -> None:
    engine = build_engine(build_runner(tiny_model("llama"), num_blocks=64))
    run(engine, [[1, 2, 3], [4, 5, 6, 7]], greedy(2))
    prompts, decode = engine.meter.samples.after(0)
    assert (prompts.sequences, prompts.prompt_tokens, prompts.decoding) == (2, 7, 0)
    assert (decode.sequences, decode.decoding, decode.context_tokens) == (2, 2, 4 + 5)


@pytest.fixture
async def engine():
    engine = AsyncEngine(build_runner(tiny_model("llama"), num_blocks=64), SchedulerLimits(64, 8, 128))
    engine.start()
    yield engine
    await engine.stop()


async def test_a_profile_leaves_nothing_but_samples(engine: AsyncEngine) -> None:
    await profile_steps(engine, max_model_len=128, budget_s=5.0)
    last_index, samples = await engine.step_samples(0)
    assert last_index == len(samples) > 0
    assert max(sample.prompt_tokens for sample in samples) >= 64
    assert max(sample.decoding for sample in samples) >= 4
    stats = await engine.stats()
    assert (stats.num_steps, stats.num_prefill_tokens, stats.num_generated_tokens, stats.num_running) == (0, 0, 0, 0)
    assert (stats.blocks.used, stats.blocks.cached, stats.num_leaked_blocks) == (0, 0, 0)
    # Prefixes of real requests are cached again.
    await generate_all(engine, Request("a", list(range(1, 30)), greedy(2)))
    assert (await engine.stats()).blocks.cached > 0


async def test_a_profile_without_time_measures_only_the_smallest_run(engine: AsyncEngine) -> None:
    await profile_steps(engine, max_model_len=128, budget_s=0.0)
    _, samples = await engine.step_samples(0)
    assert [sample.prompt_tokens for sample in samples if sample.prompt_tokens] == [16, 16]


async def test_a_profile_skips_runs_that_do_not_fit() -> None:
    engine = AsyncEngine(build_runner(tiny_model("llama"), num_blocks=5), SchedulerLimits(8, 8, 20))
    engine.start()
    try:
        await profile_steps(engine, max_model_len=20, budget_s=5.0)
        _, samples = await engine.step_samples(0)
        assert {sample.sequences for sample in samples} == {1}
    finally:
        await engine.stop()
