"""Virtual time: timers fire in order, work takes no time, and a deadlock raises an error."""

import asyncio
import time

import pytest

from cluster.simulation.virtual_loop import VirtualDeadlockError, run_virtually


def test_timers_fire_in_order_at_their_times():
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        await asyncio.gather(sleeper("late", 7200.0), sleeper("early", 0.5), sleeper("middle", 60.0))
        return seen

    seen = run_virtually(main)
    assert [name for name, _ in seen] == ["early", "middle", "late"]
    assert [at_s for _, at_s in seen] == pytest.approx([0.5, 60.0, 7200.0])


def test_work_without_timers_takes_no_time():
    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main) == 0.0


def test_timeouts_follow_the_virtual_clock():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 30.0)
        async with asyncio.timeout(10.0):
            await asyncio.sleep(9.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main) == pytest.approx(39.0)


def test_a_deadlock_is_an_error():
    async def main() -> None:
        await asyncio.sleep(5.0)
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlockError, match=r"At 5\.000 s"):
        run_virtually(main)


def test_the_clock_stops_while_a_thread_works():
    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        alarm = asyncio.create_task(asyncio.sleep(3600.0))
        result = await asyncio.to_thread(lambda: time.sleep(0.02) or 7)
        now_s = loop.time()
        alarm.cancel()
        return result, now_s

    assert run_virtually(main) == (7, 0.0)


def test_errors_propagate():
    async def main() -> None:
        await asyncio.sleep(1.0)
        raise LookupError("here")

    with pytest.raises(LookupError, match="here"):
        run_virtually(main)
