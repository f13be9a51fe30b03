"""Prompts on a simulated worker share its steps with urgent prompts and with decoding sequences."""

import asyncio

from baton.core.chunk_budget import SchedulerLimits
from baton.core.queue_priority import QueuePriority
from cluster.simulation.virtual_loop import run_virtually
from tests.simulated import STEP, generate, lone_worker, prompt, sequence
from tests.unit.cluster.simulation.test_worker import samples_of


def test_a_short_urgent_prompt_starts_beside_a_long_one():
    async def main() -> None:
        worker = lone_worker(limits=SchedulerLimits(64, 16, 4096))
        long = asyncio.create_task(
            generate(worker, sequence("long", prompt(2000), 1, queue_priority=QueuePriority(0, 100.0)))
        )
        await asyncio.sleep(0.05)
        short = await generate(worker, sequence("short", prompt(40, 1), 1, queue_priority=QueuePriority(2, 1.0)))
        step_s = (STEP.fixed + 2 * STEP.per_sequence + STEP.per_prompt_token * 64 + STEP.per_attention_pair * 2e5) / 1e3
        assert short.times_s[0] < 0.05 + 2 * step_s
        assert not long.done()
        await long

    run_virtually(main)


def test_prompts_beside_decoding_are_cut_to_its_target(monkeypatch):
    async def main() -> None:
        worker = lone_worker(limits=SchedulerLimits(1024, 16, 4096))
        samples = samples_of(worker, monkeypatch)
        target_s = 0.030
        message = sequence("decodes", prompt(50), 200)
        message.tpot_target_s = target_s
        decoding = asyncio.create_task(generate(worker, message))
        await asyncio.sleep(0.5)
        await generate(worker, sequence("long", prompt(1500, 1), 1))
        shared = [sample for sample in samples if sample.prompt_tokens and sample.decoding == 1]
        assert len(shared) > 5
        assert all(sample.ms <= 1e3 * target_s for sample in shared)
        await decoding

    run_virtually(main)
