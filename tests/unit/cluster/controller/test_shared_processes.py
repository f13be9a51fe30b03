"""Workers that share processes: what happens to them when a process does not run yet, or never will."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayError

from cluster.config.config import BatonConfig
from cluster.controller.pool_member import PoolMember
from cluster.controller.shared_processes import SharedProcesses
from cluster.controller.worker_pool import WorkerPool
from cluster.registry.progress_judge import Standing
from tests.credentials import SECRET
from tests.fake_hosts import PROCESS, FakeHost
from tests.pool_listener import READY_S, ids_in
from tests.waiting import until
from tests.worker_infos import make_info

CANCELLED_S = 60.0


class FirstProcess:
    """Only the first process finishes its start; the others never do."""

    def __init__(self, config: dict[str, Any], name: str, secret: bytes, variables: dict[str, str]) -> None:
        if name != "workers-1":
            PROCESS.get().start_endlessly()
        self._stopped: dict[str, asyncio.Event] = {}

    async def start(self, worker_id: str, pool: str, bind_host: str | None) -> dict[str, Any]:
        self._stopped[worker_id] = asyncio.Event()
        return make_info(worker_id, pool).to_dict()

    async def wait(self, worker_id: str) -> None:
        await self._stopped[worker_id].wait()

    async def stop(self, worker_id: str) -> None:
        if worker_id in self._stopped:
            self._stopped[worker_id].set()


class BrokenProcess(FirstProcess):
    """Cannot be started."""

    def __init__(self, config: dict[str, Any], name: str, secret: bytes, variables: dict[str, str]) -> None:
        raise RuntimeError(f"{name} is broken")


def processes_of(actor_class: type, per_process: int = 2) -> SharedProcesses:
    return SharedProcesses(BatonConfig(), f"{__name__}:{actor_class.__name__}", per_process, SECRET)


@pytest.fixture
async def pool(listener, a_ray):
    listener.may_drain.set()
    made = WorkerPool("decode", BatonConfig(), listener, FakeHost, "127.0.0.1", SECRET, processes_of(FirstProcess))
    made.scale(2)
    await made.wait_until_ready(READY_S)
    made.scale(6)
    await until(lambda: made.counts().pending == 4)
    yield made
    async with asyncio.timeout(CANCELLED_S):
        await made.stop()


async def test_workers_are_cancelled_before_their_process_runs(pool):
    pool.scale(2)
    async with asyncio.timeout(CANCELLED_S):
        await until(lambda: len(pool.status()["workers"]) == 2)
    assert ids_in(pool, "ready") == ["decode-1", "decode-2"]


async def test_a_pool_can_stop_while_processes_are_starting(pool):
    async with asyncio.timeout(CANCELLED_S):
        await pool.stop()
    assert pool.status()["workers"] == []


class NeverStoppingProcess(FirstProcess):
    async def stop(self, worker_id: str) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(("actor_class", "dead"), [(FirstProcess, 1), (NeverStoppingProcess, 2)])
async def test_neighbours_of_a_worker_that_hangs_live_unless_the_process_hangs(
    listener, a_ray, monkeypatch, actor_class, dead
):
    monkeypatch.setattr("cluster.controller.shared_processes._STOP_TIMEOUT_S", 0.5)
    made = WorkerPool("decode", BatonConfig(), listener, FakeHost, "127.0.0.1", SECRET, processes_of(actor_class))
    made.scale(2)
    await made.wait_until_ready(READY_S)
    made.judged("decode-1", Standing.LOST, "a step has run for 13.0 s")
    await until(lambda: len(ids_in(made, "dead")) == dead)
    assert listener.gone == ["decode-1", "decode-2"][:dead]
    await made.stop()


async def test_a_process_that_failed_to_start_gets_no_more_workers(a_ray):
    processes = processes_of(BrokenProcess)
    first, second, third = (PoolMember(f"decode-{number}", BatonConfig()) for number in (1, 2, 3))
    for member in (first, second):
        member.create(FakeHost, "decode", "127.0.0.1", SECRET, processes)
    with pytest.raises(RayError):
        await first.placed()
    assert not first.is_pending
    await first.kill()
    third.create(FakeHost, "decode", "127.0.0.1", SECRET, processes)
    assert third._actor._process is not second._actor._process
    await second.kill()
    await third.kill()
