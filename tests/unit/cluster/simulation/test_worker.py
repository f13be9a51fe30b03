"""Simulated workers take the time that they are said to take, and account for every block."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import ContextLengthError, DeadlineError, OutOfBlocksError
from baton.core.queue_priority import QueuePriority
from baton.core.step_costs import StepSample
from baton.core.steps import StepProgress
from baton.rpc.step_cost_messages import unpack_step_costs
from baton.rpc.wire import worker_pb2
from cluster.simulation.profile import SpeculationRate
from cluster.simulation.virtual_loop import run_virtually
from cluster.simulation.worker import SimulatedWorker
from tests.simulated import STEP, Pair, generate, lone_worker, make_profile, make_settings, prompt, sequence


def prompt_ms(num_tokens: int) -> float:
    """A prompt in one chunk."""
    pairs = num_tokens * (num_tokens + 1) // 2
    return STEP.fixed + STEP.per_sequence + STEP.per_prompt_token * num_tokens + STEP.per_attention_pair * pairs


def decode_ms(context_tokens: int) -> float:
    return STEP.fixed + STEP.per_sequence + STEP.per_context_token * context_tokens


def samples_of(worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch) -> list[StepSample]:
    """A list of the samples that the worker learns from, from now on."""
    found: list[StepSample] = []
    learn = worker.engine.step_costs.measured
    monkeypatch.setattr(worker.engine.step_costs, "measured", lambda sample: (found.append(sample), learn(sample)))
    return found


def test_a_single_request_takes_the_modelled_time():
    async def main() -> None:
        answer = await generate(lone_worker(), sequence("a", prompt(100), 40))
        assert len(answer.token_ids) == 40
        assert answer.finish_reason == "length"
        assert answer.times_s[0] * 1e3 == pytest.approx(prompt_ms(100))
        decoding = sum(decode_ms(100 + position) for position in range(1, 40))
        assert answer.times_s[-1] * 1e3 == pytest.approx(prompt_ms(100) + decoding)

    run_virtually(main)


def test_a_long_prompt_is_computed_in_chunks():
    async def main() -> None:
        worker = lone_worker()
        answer = await generate(worker, sequence("a", prompt(600), 1))
        expected = prompt_ms(600) + 2 * (STEP.fixed + STEP.per_sequence)
        assert answer.times_s[0] * 1e3 == pytest.approx(expected)
        assert worker.stats().num_steps == 3

    run_virtually(main)


def test_a_prompt_computed_alone_shows_no_other_requests():
    async def main() -> None:
        answer = await generate(lone_worker(), sequence("a", prompt(100), 2))
        [step] = answer.batches[0].steps
        assert step.num_computed_tokens == step.num_prompt_tokens == 100

    run_virtually(main)


def test_a_worker_reports_the_step_in_progress_also_within_a_leap():
    async def main() -> None:
        worker = lone_worker()
        assert worker.engine.progress() == StepProgress(0)
        running = asyncio.create_task(generate(worker, sequence("a", prompt(100), 40)))
        seen = []
        while not running.done():
            await asyncio.sleep(0.003)
            seen.append(worker.engine.progress())
        assert [each.num_steps for each in seen] == sorted(each.num_steps for each in seen)
        assert len({each.num_steps for each in seen}) > 20
        assert all(each.step_age_s <= each.expected_step_s + 1e-6 for each in seen[:-1])
        assert worker.engine.progress() == StepProgress(40)

    run_virtually(main)


def test_a_probe_is_a_step_of_an_idle_worker():
    async def main() -> None:
        worker = lone_worker()
        await worker.probe()
        assert worker.engine.progress() == StepProgress(1)
        running = asyncio.create_task(generate(worker, sequence("a", prompt(100), 4)))
        await asyncio.sleep(0.001)
        await worker.probe()
        await running
        assert worker.engine.progress() == StepProgress(5)
        assert worker.check() == []

    run_virtually(main)


def test_messages_grow_to_their_size_limit():
    async def main() -> None:
        answer = await generate(lone_worker(tokens_per_message=8), sequence("a", prompt(20), 40))
        assert [len(batch.token_ids) for batch in answer.batches] == [1, 1, 2, 4, 8, 8, 8, 8]

    run_virtually(main)


def test_speculation_gives_several_tokens_per_step(monkeypatch):
    rates = [SpeculationRate(batch=1, tokens_per_round=2.5, drafted=4)]

    async def main() -> None:
        worker = lone_worker(profile=make_profile(speculation=rates))
        samples = samples_of(worker, monkeypatch)
        answer = await generate(worker, sequence("a", prompt(20), 51))
        assert len(answer.token_ids) == 51
        assert worker.stats().num_steps == 1 + 20
        assert any(sample.drafted_tokens == 4 and sample.decoding == 1 for sample in samples)

    run_virtually(main)


def test_a_handoff_takes_the_time_of_its_bytes():
    async def main() -> None:
        pair = Pair()
        answer = await pair.run("a", prompt(100), 10)
        assert answer.handoff is not None
        assert (answer.handoff.num_tokens, answer.handoff.num_bytes) == (100, 10_000)
        part = answer.handoff.parts[0]
        assert part.acknowledged_s - part.started_s == pytest.approx(0.005 + 10_000 / 1e6)
        arrived_ms = prompt_ms(100) + 5.0 + 10.0
        assert answer.times_s[1] * 1e3 == pytest.approx(arrived_ms + decode_ms(101))
        assert len(answer.token_ids) == 10
        await asyncio.sleep(60)
        assert pair.leaks() == []

    run_virtually(main)


def test_tokens_held_by_the_decode_worker_are_not_transferred():
    async def main() -> None:
        pair = Pair()
        await pair.run("a", prompt(96), 4)
        answer = await pair.run("b", prompt(96), 4)
        assert answer.handoff is not None
        assert (answer.handoff.num_tokens, answer.handoff.num_cached_tokens) == (0, 96)
        assert answer.batches[0].num_cached_tokens == 80  # at least one token is computed for its logits

    run_virtually(main)


def test_answers_are_the_same_wherever_they_resume():
    async def main() -> None:
        whole = await generate(lone_worker(), sequence("a", prompt(30), 30, seed=5))
        resumed = await generate(lone_worker(), sequence("a", prompt(30), 30, whole.token_ids[:11], seed=5))
        assert whole.token_ids[11:] == resumed.token_ids
        pair = await Pair().run("a", prompt(30), 30)
        assert len(pair.token_ids) == 30

    run_virtually(main)


def test_answers_can_end_early():
    async def main() -> None:
        worker = lone_worker(profile=make_profile(output_tokens=20))
        answers = [
            await generate(worker, sequence(str(seed), prompt(10 + seed), 400, seed=seed, ignore_eos=False))
            for seed in range(8)
        ]
        assert {answer.finish_reason for answer in answers} == {"stop"}
        assert all(answer.token_ids[-1] == 2 and 2 not in answer.token_ids[:-1] for answer in answers)
        assert len({len(answer.token_ids) for answer in answers}) > 3

    run_virtually(main)


def test_urgent_requests_go_first():
    async def main() -> None:
        worker = lone_worker(limits=SchedulerLimits(256, 1, 4096))
        loop, order = asyncio.get_running_loop(), []

        async def ask(name: str, queue_priority: QueuePriority) -> None:
            await generate(worker, sequence(name, prompt(50), 5, queue_priority=queue_priority))
            order.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask("first", QueuePriority(0)))
            await asyncio.sleep(0.001)
            group.create_task(ask("batch", QueuePriority(0, loop.time() + 1)))
            group.create_task(ask("late", QueuePriority(1, loop.time() + 9)))
            group.create_task(ask("soon", QueuePriority(1, loop.time() + 2)))
        assert order == ["first", "soon", "late", "batch"]

    run_virtually(main)


def test_preemption_loses_no_token():
    async def main() -> None:
        worker = lone_worker(num_blocks=24)
        messages = [sequence(str(index), prompt(60, index), 120) for index in range(4)]
        answers = await asyncio.gather(*(generate(worker, message) for message in messages))
        assert worker.stats().num_preemptions > 0
        alone = [await generate(lone_worker(), message) for message in messages]
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
        assert worker.check() == []
        assert worker.stats().kv_blocks_used == 0

    run_virtually(main)


def test_a_reservation_waits_for_room_until_its_deadline():
    async def main() -> None:
        pair = Pair(num_blocks=10, reserve_timeout_s=0.5)
        long = asyncio.create_task(generate(pair.decode, sequence("long", prompt(60, 1), 90)))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(pair.run("waits", prompt(120, 2), 1))
        await long
        answer = await waiting
        assert len(answer.token_ids) == 1
        await asyncio.sleep(60)
        holding = asyncio.create_task(generate(pair.decode, sequence("holds", prompt(60, 3), 95)))
        await asyncio.sleep(0.05)
        message = worker_pb2.PrefillRequest(sequence=sequence("late", prompt(120, 4), 5))
        message.handoff.transfer_id, message.handoff.peer = "late", "decode"
        events = [event async for event in pair.prefill.prefill(message)]
        assert events[-1].handoff.error_code == OutOfBlocksError.code
        await holding
        await asyncio.sleep(60)
        assert pair.leaks() == []

    run_virtually(main)


def test_impossible_requests_are_refused_and_late_ones_end():
    async def main() -> None:
        worker = lone_worker()
        with pytest.raises(ContextLengthError, match="4096"):
            await generate(worker, sequence("a", prompt(4000), 97))
        slow = worker.generate(worker_pb2.GenerateRequest(sequence=sequence("b", prompt(50), 2000)), timeout_s=1.0)
        with pytest.raises(DeadlineError):
            async for _ in slow:
                pass
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)
        await asyncio.sleep(1.0)
        assert worker.stats().kv_blocks_used == 0

    run_virtually(main)


def test_samples_follow_the_formula(monkeypatch):
    async def main() -> None:
        worker = lone_worker()
        samples = samples_of(worker, monkeypatch)
        await generate(worker, sequence("a", prompt(300), 2000))
        assert len(samples) > 20
        for sample in samples:
            expected = (
                STEP.fixed
                + STEP.per_prompt_token * sample.prompt_tokens
                + STEP.per_attention_pair * sample.attention_pairs
                + STEP.per_sequence * sample.sequences
                + STEP.per_context_token * sample.context_tokens
            )
            assert sample.ms == pytest.approx(expected, rel=1e-3)
        reported = unpack_step_costs(worker.stats().step_costs)
        assert reported.num_samples >= len(samples)
        assert reported.costs.decode_ms(1, 1000) == pytest.approx(
            STEP.fixed + STEP.per_sequence + 1000 * STEP.per_context_token, rel=1e-2
        )

    run_virtually(main)


def test_cache_events_are_sent():
    async def main() -> None:
        worker = lone_worker()
        watching = worker.watch_cache()
        assert (await anext(watching)).is_snapshot
        await generate(worker, sequence("a", prompt(64), 1))
        assert len((await anext(watching)).stored) == 4 * 16
        await watching.aclose()

    run_virtually(main)


workloads = st.lists(
    st.tuples(
        st.floats(0, 2), st.integers(1, 300), st.integers(1, 80), st.booleans(), st.one_of(st.none(), st.floats(0, 2))
    ),
    min_size=1,
    max_size=12,
)


def play(workload, longest_leap=1024, **changes):
    """Requests at their times, some by way of both workers, some given up; (tokens, end) of each, and what leaked."""

    async def main():
        pair = Pair(**changes)
        for worker in (pair.prefill, pair.decode):
            worker.engine.longest_leap = longest_leap

        async def one(index, at_s, num_prompt, max_tokens, both, patience_s):
            await asyncio.sleep(at_s)
            tokens = prompt(num_prompt, index % 3)
            work = (
                pair.run(str(index), tokens, max_tokens)
                if both
                else generate(pair.decode, sequence(str(index), tokens, max_tokens))
            )
            try:
                answer = await asyncio.wait_for(work, patience_s)
            except (TimeoutError, ExceptionGroup):
                if patience_s is None:
                    raise
                return None  # the prefill worker may hear of it first, and its hand-off breaks off
            return tuple(answer.token_ids), answer.times_s[-1]

        results = await asyncio.gather(*(one(index, *request) for index, request in enumerate(workload)))
        await asyncio.sleep(120)
        usages = [worker.blocks.usage().used for worker in (pair.prefill, pair.decode)]
        return results, pair.leaks(), usages

    return run_virtually(main)


@settings(max_examples=40, deadline=None)
@example([(0.0, 1, 1, False, None), (1.0, 257, 15, False, None), (1.0, 161, 2, True, 0.25)], 28)
@given(workloads, st.integers(28, 200))
def test_every_request_ends_and_every_block_is_freed(workload, num_blocks):
    results, leaks, used = play(workload, num_blocks=num_blocks)
    assert leaks == []
    assert used == [0, 0]
    for (_, _, max_tokens, _, patience_s), result in zip(workload, results, strict=True):
        if patience_s is None:
            assert result is not None
            assert len(result[0]) == max_tokens


@settings(max_examples=25, deadline=None)
@given(workloads)
def test_a_leap_equals_its_steps(workload):
    # Timers of one moment have no order, so no two requests come at the same one.
    quiet = [
        (at_s + 1.2345678e-5 * index, num_prompt, max_tokens, both, None)
        for index, (at_s, num_prompt, max_tokens, both, _) in enumerate(workload)
    ]
    leaping, stepping = play(quiet), play(quiet, longest_leap=1)
    for (tokens, end_s), (same_tokens, same_end_s) in zip(leaping[0], stepping[0], strict=True):
        assert tokens == same_tokens
        assert end_s == pytest.approx(same_end_s, abs=1e-6)


def test_equal_seeds_give_equal_runs():
    workload = [(0.1 * index, 50 + 9 * index, 40, index % 2 == 0, None) for index in range(10)]
    profile = make_profile(noise=0.2)
    first = play(workload, profile=profile)
    assert first == play(workload, profile=profile)
    assert first != play(workload, profile=profile, seed=1)


def test_settings_contain_all_that_the_registry_needs():
    info = make_settings().info("here", "proof", "node", 1)
    assert info.kv_bytes_per_token == 100
    assert (info.kv_blocks, info.block_size, info.max_num_seqs, info.chunk_tokens) == (256, 16, 16, 256)
    assert info.kv_fingerprint == make_settings("prefill").info("there", "proof", "node", 1).kv_fingerprint
