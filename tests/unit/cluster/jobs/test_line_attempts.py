"""A line whose router is lost while it runs is retried a bounded number of times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.jobs.job_run import JobRun
from cluster.jobs.job_types import Status
from cluster.jobs.line_attempts import MAX_LOST
from cluster.jobs.result_lines import Answer
from tests.unit.cluster.jobs.job_world import ALL, World
from tests.waiting import until

POISON = 3


class Routers:
    """One router after the other. Each is lost, without a chance to write anything, as soon as ``kills`` says so.

    Attributes:
        num_lost: routers lost so far.
        seen: the lines that each router has sent.
    """

    def __init__(self, world: World, kills: Callable[[list[int]], bool]) -> None:
        self._world = world
        self._kills = kills
        self._lost: list[asyncio.Task[None]] = []
        self.seen: list[list[int]] = []

    @property
    def num_lost(self) -> int:
        return len(self._lost)

    async def run(self) -> None:
        """Runs the job to its end."""
        while not await self._runs_to_the_end():
            pass
        for task in self._lost:  # the lease has gone to others, so that these can change nothing any more
            task.cancel()
        await asyncio.gather(*self._lost, return_exceptions=True)

    async def _runs_to_the_end(self) -> bool:
        run: JobRun = self._world.claim()
        sent = self._world.sender.seen = []
        self.seen.append(sent)
        task = asyncio.create_task(run.run())
        await until(lambda: task.done() or self._kills(sent))
        if task.done():
            task.result()
            return True
        self._lost.append(task)
        return False


async def test_a_line_that_kills_its_router_gets_an_error_and_the_batch_completes(world: World) -> None:
    world.sender.is_held = lambda line: line.number == POISON
    routers = Routers(world, lambda sent: POISON in sent)
    await routers.run()
    assert routers.num_lost == MAX_LOST
    assert world.now().status is Status.COMPLETED
    assert world.errors() == {f"n{POISON}": "router_lost"}
    assert world.contents() == [name for name in ALL if name != f"n{POISON}"]


async def test_lines_beside_the_one_that_kills_routers_have_results(world: World) -> None:
    """Four lines share the first two losses, since none of them ends before."""
    world.sender.is_held = lambda line: line.number == POISON or len(routers.seen) <= 2
    routers = Routers(world, lambda sent: len(sent) == 4 if len(routers.seen) <= 2 else POISON in sent)
    await routers.run()
    assert routers.num_lost == MAX_LOST
    assert routers.seen[2] == [1, 2, POISON]  # one after the other
    assert world.errors() == {f"n{POISON}": "router_lost"}
    assert len(world.contents()) == len(ALL) - 1


async def test_routers_that_stop_in_order_do_not_count(world: World) -> None:
    world.sender.is_held = lambda line: True
    for _ in range(2 * MAX_LOST):
        world.sender.seen = []
        stopped = asyncio.create_task(world.claim().run())
        await until(lambda: len(world.sender.seen) == 4)
        assert world.store.open_attempts(world.job.id) == {1: 1, 2: 1, 3: 1, 4: 1}
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        assert world.store.open_attempts(world.job.id) == {}
    world.sender.is_held = lambda line: False
    await world.claim().run()
    assert (world.contents(), world.errors()) == (ALL, {})


async def test_a_line_that_waits_for_another_try_is_not_lost_with_its_router(world: World) -> None:
    full = Answer(503, "id", b'{"error":{"code":"no_worker"}}', retry_after_s=30.0)
    world.sender.refuse = lambda line: full if line.number == POISON else None
    waiting = asyncio.create_task(world.claim().run())
    await until(lambda: world.now().num_completed == len(ALL) - 1)
    await until(lambda: world.store.open_attempts(world.job.id) == {})
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
