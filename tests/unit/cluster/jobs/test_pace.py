"""How many lines run beside urgent requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from baton.core.slo import BATCH, INTERACTIVE, SloClass
from cluster.jobs.pace import Pace
from cluster.requests.request_record import RequestRecord
from tests.fake_clock import FakeClock
from tests.job_services import is_urgent
from tests.request_records import make_record


def record(slo: SloClass = INTERACTIVE) -> RequestRecord:
    return make_record(slo=slo)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pace(clock: FakeClock) -> Pace:
    return Pace(8, is_urgent, clock)


async def num_started(pace: Pace, wanted: int) -> int:
    """How many of so many lines may start now."""
    async with AsyncExitStack() as stack:
        tasks = [asyncio.create_task(stack.enter_async_context(pace.permit())) for _ in range(wanted)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        count = pace.num_in_flight
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return count


async def test_lines_fill_the_limit_while_nothing_urgent_comes(pace: Pace) -> None:
    assert await num_started(pace, 20) == 8
    pace.accepted(record(BATCH))
    assert await num_started(pace, 20) == 8


async def test_one_line_runs_while_an_urgent_request_waits_for_its_first_token(pace: Pace) -> None:
    urgent = record()
    pace.accepted(urgent)
    assert await num_started(pace, 20) == 1
    pace.first_token(urgent)
    assert await num_started(pace, 20) == 4
    pace.ended(urgent)
    assert pace.num_in_flight == 0


async def test_waiting_lines_start_with_the_first_token(pace: Pace) -> None:
    urgent = record()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pace.permit())
        pace.accepted(urgent)
        waiting = asyncio.create_task(stack.enter_async_context(pace.permit()))
        await asyncio.sleep(0.01)
        assert pace.num_in_flight == 1
        pace.ended(urgent)
        await waiting
        assert pace.num_in_flight == 2


async def test_the_limit_halves_for_a_burst_and_grows_with_finished_lines(pace: Pace, clock: FakeClock) -> None:
    for _ in range(5):
        pace.accepted(record())
    assert pace.limit == 4
    pace.ended(record())
    for _ in range(4):
        clock.now_s += 1
        pace.shrink()
    assert pace.limit == 1
    for _ in range(1 + 2 + 3 + 4 + 5 + 6 + 7 + 8):
        async with pace.permit():
            pass
    assert pace.limit == 8


async def test_a_cancelled_line_gives_its_turn_to_the_next(pace: Pace) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(pace.permit())
        turns = [pace.permit() for _ in range(2)]
        waiting = [asyncio.create_task(turn.__aenter__()) for turn in turns]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
    await waiting[1]
    assert pace.num_in_flight == 1


async def test_a_line_alone_waits_for_the_others_and_holds_those_behind_it(pace: Pace) -> None:
    running: list[str] = []
    ends = {name: asyncio.Event() for name in "abcd"}

    async def run(name: str, *, alone: bool = False) -> None:
        async with pace.permit(alone=alone):
            running.append(name)
            await ends[name].wait()
            running.remove(name)

    tasks = [asyncio.create_task(run(name, alone=name == "c")) for name in "abcd"]
    for ended, expected in (("", "ab"), ("a", "b"), ("b", "c"), ("c", "d"), ("d", "")):
        if ended:
            ends[ended].set()
        for _ in range(4):
            await asyncio.sleep(0)
        assert "".join(running) == expected
    await asyncio.gather(*tasks)
    assert await num_started(pace, 20) == 8


async def test_a_line_that_would_run_alone_and_is_cancelled_holds_nothing(pace: Pace) -> None:
    async with pace.permit():
        waiting = asyncio.create_task(anext(aiter_permit(pace)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await num_started(pace, 20) == 8


async def aiter_permit(pace: Pace) -> AsyncIterator[None]:
    async with pace.permit(alone=True):
        yield
