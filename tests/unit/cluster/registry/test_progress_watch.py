"""The watch over workers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from baton.core.errors import DeadlineError, InternalError, WorkerLostError
from baton.core.steps import StepProgress
from cluster.registry.liveness_config import LivenessConfig
from cluster.registry.progress_judge import Standing
from cluster.registry.progress_watch import ProgressWatch
from cluster.simulation.virtual_loop import run_virtually

Judged = tuple[str, Standing]


class Client:
    """A worker that makes a step between two pings, unless it is idle, and answers unless it is frozen."""

    def __init__(self, *, idle: bool = False) -> None:
        self.is_idle = idle
        self.is_frozen = self.is_gone = self.is_broken = False
        self.num_pings = self.num_probes = self.num_steps = 0

    async def ping(self, timeout_s: float) -> StepProgress:
        self.num_pings += 1
        await self._answer(timeout_s)
        self.num_steps += not self.is_idle
        return StepProgress(self.num_steps)

    async def probe(self, timeout_s: float) -> None:
        self.num_probes += 1
        await self._answer(timeout_s)
        if self.is_broken:
            raise InternalError("the device is broken")
        self.num_steps += 1

    async def _answer(self, timeout_s: float) -> None:
        if self.is_gone:
            raise WorkerLostError("connection refused")
        give_up_s = asyncio.get_running_loop().time() + timeout_s
        while self.is_frozen:
            await asyncio.sleep(0.1)
            if asyncio.get_running_loop().time() >= give_up_s:
                raise DeadlineError("no answer")


class Scene:
    """A watch over some workers, and what it has said of them."""

    def __init__(self, **clients: Client) -> None:
        self.clients = clients
        self.judgements: list[Judged] = []
        self.watch = ProgressWatch(LivenessConfig(), self._judged, asyncio.get_running_loop().time)

    def _judged(self, worker_id: str, standing: Standing, reason: str) -> None:
        assert (reason == "") == (standing is Standing.TRUSTED)
        self.judgements.append((worker_id, standing))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Scene]:
        for worker_id, client in self.clients.items():
            self.watch.add(worker_id, client)
        task = asyncio.create_task(self.watch.run())
        await asyncio.sleep(20)
        assert self.judgements == []
        yield self
        task.cancel()


def in_virtual_time(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtually(test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_virtual_time
async def test_a_frozen_worker_is_suspected_within_four_seconds_and_lost_ten_seconds_later() -> None:
    async with Scene(a=Client(), b=Client()).running() as scene:
        scene.clients["a"].is_frozen = True
        await asyncio.sleep(4)
        assert scene.judgements == [("a", Standing.SUSPECTED)]
        await asyncio.sleep(11)
        assert scene.judgements == [("a", Standing.SUSPECTED), ("a", Standing.LOST)]


@in_virtual_time
async def test_a_worker_that_continues_is_trusted_again() -> None:
    async with Scene(a=Client(), idle=Client(idle=True)).running() as scene:
        for client in scene.clients.values():
            client.is_frozen = True
        await asyncio.sleep(5)
        for client in scene.clients.values():
            client.is_frozen = False
        await asyncio.sleep(2)
        assert sorted(scene.judgements[:2]) == [("a", Standing.SUSPECTED), ("idle", Standing.SUSPECTED)]
        assert sorted(scene.judgements[2:]) == [("a", Standing.TRUSTED), ("idle", Standing.TRUSTED)]


@in_virtual_time
async def test_an_idle_worker_computes_a_token_every_ten_seconds() -> None:
    async with Scene(busy=Client(), idle=Client(idle=True)).running() as scene:
        await asyncio.sleep(40)
        assert scene.clients["busy"].num_probes == 0
        assert 4 <= scene.clients["idle"].num_probes <= 6
        scene.clients["idle"].is_broken = True
        await asyncio.sleep(12)
        assert scene.judgements[0] == ("idle", Standing.SUSPECTED)


@in_virtual_time
async def test_a_check_learns_at_once_that_a_worker_is_gone() -> None:
    async with Scene(gone=Client(), frozen=Client()).running() as scene:
        scene.clients["gone"].is_gone = scene.clients["frozen"].is_frozen = True
        begun_s = asyncio.get_running_loop().time()
        await scene.watch.check("gone")
        assert asyncio.get_running_loop().time() == begun_s
        assert scene.judgements == [("gone", Standing.SUSPECTED)]
        await scene.watch.check("frozen")
        assert asyncio.get_running_loop().time() == begun_s + 0.5
        assert scene.judgements == [("gone", Standing.SUSPECTED)]
        await scene.watch.check("unknown")


@in_virtual_time
async def test_a_removed_worker_is_not_judged_any_more() -> None:
    async with Scene(a=Client()).running() as scene:
        scene.clients["a"].is_frozen = True
        await asyncio.sleep(2)
        scene.watch.remove("a")
        scene.watch.remove("a")
        await asyncio.sleep(20)
        assert scene.judgements == []


@in_virtual_time
async def test_a_thousand_workers_are_pinged_every_two_seconds_and_judged_within_five() -> None:
    clients = {f"w{number}": Client() for number in range(1000)}
    async with Scene(**clients).running() as scene:
        num_pings = clients["w7"].num_pings
        await asyncio.sleep(20)
        assert clients["w7"].num_pings - num_pings == 10
        clients["w7"].is_frozen = True
        await asyncio.sleep(5)
        assert scene.judgements == [("w7", Standing.SUSPECTED)]


def test_a_watch_that_was_blocked_suspects_nobody() -> None:
    """While the event loop is blocked, answers wait, and all workers look silent."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        blocked_s = 0.0
        judgements: list[Judged] = []
        watch = ProgressWatch(
            LivenessConfig(),
            lambda worker_id, standing, reason: judgements.append((worker_id, standing)),
            lambda: loop.time() + blocked_s,
        )

        class Slow(Client):
            async def ping(self, timeout_s: float) -> StepProgress:
                await asyncio.sleep(0.6)  # so that each block finds an open ping
                return await super().ping(timeout_s)

        watch.add("a", Slow())
        task = asyncio.create_task(watch.run())
        for _ in range(20):
            await asyncio.sleep(2.25)
            blocked_s += 60.0
        assert judgements == []
        task.cancel()

    run_virtually(main)
