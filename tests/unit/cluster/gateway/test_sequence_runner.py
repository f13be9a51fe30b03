"""Concurrent sequences of one request: their order, their ends and their cleanup."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import BatonError, WorkerLostError
from baton.core.outcomes import ENDED_BY
from baton.core.request import FinishReason, SamplingParams
from baton.core.timeline import Timeline
from cluster.gateway.sequence_runner import SequenceSpec, Starts, run_sequences
from cluster.requests.generation import GenerationRequest, TokenChunk
from tests.waiting import until

Script = Callable[[], AsyncGenerator[TokenChunk]]


def chunk(*, last: bool = False) -> TokenChunk:
    return TokenChunk((1,), finish_reason=FinishReason.LENGTH if last else None)


class Generator:
    """Plays a script for each sequence."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = scripts
        self.begun: list[int] = []
        self.closed: list[int] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk]:
        number = int(request.request_id)
        self.begun.append(number)
        try:
            async with aclosing(self.scripts[number]()) as chunks:
                async for one in chunks:
                    yield one
        finally:
            self.closed.append(number)


class Processor:
    """Finds a stop string in the chunk of some number, or the end."""

    def __init__(self, stop_at: int = 99) -> None:
        self.stop_at = stop_at
        self.count = 0
        self.is_finished = False

    def process(self, one: TokenChunk) -> Any:
        self.count += 1
        self.is_finished = one.finish_reason is not None or self.count == self.stop_at
        return SimpleNamespace(number=self.count)


def spec(number: int, stop_at: int = 99, starts_after: int | None = None) -> SequenceSpec:
    request = GenerationRequest(str(number), (1,), SamplingParams(), Timeline(str(number)))
    return SequenceSpec(number, request, Processor(stop_at), starts_after)  # type: ignore[arg-type]


async def finishing() -> AsyncGenerator[TokenChunk]:
    yield chunk()
    yield chunk(last=True)


async def endless() -> AsyncGenerator[TokenChunk]:
    while True:
        await asyncio.sleep(0)
        yield chunk()


def failing_after(event: asyncio.Event) -> Script:
    async def script() -> AsyncGenerator[TokenChunk]:
        yield chunk()
        await event.wait()
        raise WorkerLostError("gone")

    return script


async def test_a_failure_marks_only_unfinished_sequences() -> None:
    done = asyncio.Event()
    generator, specs = Generator(finishing, endless, failing_after(done)), [spec(0), spec(1), spec(2)]

    async def read() -> None:
        async with aclosing(run_sequences(generator, specs, Starts())) as deltas:
            async for index, delta in deltas:
                if (index, delta.number) == (0, 2):
                    done.set()

    with pytest.raises(BatonError, match="gone"):
        await read()
    ended_by = [one.request.timeline.attributes.get(ENDED_BY) for one in specs]
    assert ended_by == [None, WorkerLostError.code, WorkerLostError.code]
    assert sorted(generator.closed) == [0, 1, 2]


async def test_a_stop_string_is_a_finish_even_if_the_client_leaves() -> None:
    generator, own = Generator(endless), spec(0, stop_at=3)
    async with aclosing(run_sequences(generator, [own], Starts())) as deltas:
        async for _, delta in deltas:
            if delta.number == 3:
                break
    assert own.request.timeline.attributes[ENDED_BY] == FinishReason.STOP
    assert generator.closed == [0]


async def test_leaving_closes_running_sequences_and_starts_no_waiting_ones() -> None:
    generator = Generator(endless, endless, endless)
    never = asyncio.Event()

    async def silent() -> AsyncGenerator[TokenChunk]:
        await never.wait()
        yield chunk()

    generator.scripts = (silent, endless, endless)
    async with aclosing(run_sequences(generator, [spec(0), spec(1), spec(2, starts_after=0)], Starts())) as deltas:
        async for index, _ in deltas:
            assert index == 1
            break
    assert sorted(generator.closed) == sorted(generator.begun) == [0, 1]


async def test_waiting_sequences_start_with_the_first_token_of_another() -> None:
    generator = Generator(finishing, finishing)
    seen = []
    async with aclosing(run_sequences(generator, [spec(0), spec(1, starts_after=0)], Starts())) as deltas:
        async for index, delta in deltas:
            seen.append((index, delta.number))
            if len(seen) == 1:
                assert generator.begun[0] == 0
    assert seen[0] == (0, 1)
    assert sorted(seen) == [(0, 1), (0, 2), (1, 1), (1, 2)]


async def test_a_request_starts_few_sequences_at_a_time() -> None:
    held = asyncio.Event()

    async def waiting() -> AsyncGenerator[TokenChunk]:
        await held.wait()
        yield chunk()
        await asyncio.sleep(0)
        yield chunk(last=True)

    generator = Generator(*[waiting] * 100)
    async with aclosing(run_sequences(generator, [spec(number) for number in range(100)], Starts())) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await until(lambda: len(generator.begun) >= 32)
        await asyncio.sleep(0.01)
        assert generator.begun == list(range(32))
        held.set()
        await first
        assert len([delta async for delta in deltas]) == 199
    assert sorted(generator.closed) == list(range(100))


async def test_sequences_of_several_requests_start_a_few_in_each_pass() -> None:
    generators = [Generator(*[endless] * 10) for _ in range(2)]
    starts, seen = Starts(), [0]
    runs = [run_sequences(each, [spec(number) for number in range(10)], starts) for each in generators]
    waiting = [asyncio.ensure_future(anext(run)) for run in runs]
    while seen[-1] < 20:
        await asyncio.sleep(0)
        seen.append(sum(len(each.begun) for each in generators))
    assert max(after - before for before, after in pairwise(seen)) <= 4
    await asyncio.gather(*waiting)
    for run in runs:
        await run.aclose()


async def test_what_waits_for_the_first_sequence_comes_after_it() -> None:
    async def first() -> AsyncGenerator[TokenChunk]:
        await asyncio.sleep(0)
        yield chunk(last=True)

    specs = [spec(0), *(spec(number, starts_after=0) for number in range(1, 4))]
    found = [index async for index, _ in run_sequences(Generator(first, *[finishing] * 3), specs, Starts())]
    assert found[0] == 0


async def test_a_request_runs_a_bounded_number_of_sequences() -> None:
    generator = Generator(*[endless] * 300)
    specs = [spec(number, stop_at=10**9) for number in range(300)]
    num_deltas = 0
    async with aclosing(run_sequences(generator, specs, Starts())) as deltas:
        async for _ in deltas:
            num_deltas += len(generator.begun) == 256
            if num_deltas == 1000:
                break
    assert generator.begun == list(range(256))
    assert sorted(generator.closed) == generator.begun


def test_requests_share_the_number_of_sequences_that_run() -> None:
    starts, found = Starts(), []
    with ExitStack() as requests:
        for _ in range(64):
            requests.enter_context(starts.request())
            found.append(starts.max_running)
    assert [found[0], found[1], found[7], found[63]] == [256, 128, 32, 8]
    assert starts.max_running == 256


async def test_the_first_choices_of_all_prompts_start_before_the_others() -> None:
    specs = [spec(number, starts_after=number - number % 2 if number % 2 else None) for number in range(8)]
    generator = Generator(*[finishing] * 8)
    assert len([delta async for delta in run_sequences(generator, specs, Starts())]) == 16
    assert generator.begun == [0, 2, 4, 6, 1, 3, 5, 7]


async def test_leaving_ends_a_few_sequences_in_each_pass() -> None:
    generator = Generator(*[endless] * 40)
    deltas = run_sequences(generator, [spec(number, stop_at=10**9) for number in range(40)], Starts())
    while len(generator.begun) < 40:
        await anext(deltas)
    closing, seen = asyncio.ensure_future(deltas.aclose()), [0]
    while not closing.done():
        await asyncio.sleep(0)
        seen.append(len(generator.closed))
    assert seen[-1] == 40
    assert max(after - before for before, after in pairwise(seen)) <= 8


async def test_a_second_cancellation_while_leaving_ends_all_sequences() -> None:
    generator, specs = Generator(*[endless] * 40), [spec(number, stop_at=10**9) for number in range(40)]

    async def read() -> None:
        async with aclosing(run_sequences(generator, specs, Starts())) as deltas:
            async for _ in deltas:
                pass

    reading = asyncio.create_task(read())
    await until(lambda: len(generator.begun) == 40)
    for _ in range(2):
        reading.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert sorted(generator.closed) == list(range(40))
