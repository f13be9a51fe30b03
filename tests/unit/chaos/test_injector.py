"""The order of faults and recoveries, with a cluster that is a list of workers."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import httpx
import psutil
import pytest

from baton.core.roles import DECODE, POOLS, PREFILL
from tests.chaos.faults import Fault, Victim, lose_controller
from tests.chaos.injector import Injector
from tests.chaos.plan import Planned, Stage
from tests.chaos.target import RecoveryError, Target
from tests.namespaces import Host

FIGURES = {"running": 0, "waiting": 0, "transfers": 0, "in_flight": 0}


class FakeTarget(Target):
    """A cluster with two workers in each pool, which a test changes."""

    def __init__(self, hosts: Mapping[str, Host] | None = None) -> None:
        super().__init__(httpx.AsyncClient(), 2, hosts or {})
        self.table = [self.worker(pool, number) for pool in POOLS for number in range(2)]

    def worker(self, pool: str, number: int, state: str = "ready", host: str = "h") -> dict[str, Any]:
        known = {"id": f"{pool}-{number}", "pool": pool, "state": state, "pid": os.getpid(), "address": f"{host}:1"}
        return {**known, **FIGURES}

    async def workers(self, pool: str | None = None) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        return [dict(worker) for worker in self.table if pool in (None, worker["pool"])]

    def find(self, worker_id: str) -> dict[str, Any]:
        return next(worker for worker in self.table if worker["id"] == worker_id)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("injector", "target"):
        monkeypatch.setattr(f"tests.chaos.{module}.RECOVERY_S", 1.0)
    monkeypatch.setattr("tests.chaos.injector._POLL_S", 0.001)
    monkeypatch.setattr("tests.chaos.injector._STAGE_WAIT_S", 0.01)
    monkeypatch.setattr("tests.chaos.target._SLOW_POLL_S", 0.001)


async def test_the_worker_at_the_wanted_stage_is_hit_and_must_be_replaced() -> None:
    target, hit = FakeTarget(), asyncio.Event()

    async def strike(victim: Victim) -> None:
        hit.set()

    target.find("decode-1")["transfers"] = 1
    injector = Injector(target)
    plan = iter([Planned(Fault("kill", "kills", strike, replaces=True), Stage.HANDOFF)])
    running = asyncio.create_task(injector.run(DECODE, plan, asyncio.Event()))
    await hit.wait()
    [found] = injector.strikes
    assert (found.worker, found.stages) == ("decode-1", {"queued": 0, "decode": 0, "hand-off": 1})
    target.table.remove(target.find("decode-1"))
    target.table.append(target.worker(DECODE, 2, "starting"))
    assert not (await asyncio.wait({running}, timeout=0.05))[0]
    target.find("decode-2")["state"] = "ready"
    await running
    assert found.recovered_s > found.at_s


async def test_a_pool_with_a_missing_worker_has_no_fault() -> None:
    target, pools = FakeTarget(), list[str]()

    async def strike(victim: Victim) -> None:
        pools.append(victim.pool)

    target.find("decode-0")["state"] = "suspected"
    fault = Fault("freeze", "freezes", strike)
    with pytest.raises(RecoveryError, match="decode is not complete"):
        await Injector(target).run(DECODE, iter([Planned(fault, Stage.QUEUED)]), asyncio.Event())
    await Injector(target).run(PREFILL, iter([Planned(fault, Stage.QUEUED)]), asyncio.Event())
    assert pools == [PREFILL]


@pytest.mark.parametrize("shares", [True, False])
async def test_a_host_with_two_workers_of_a_pool_is_not_cut_off(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, struck = FakeTarget({"h": Host("a", "h"), "i": Host("b", "i")}), list[str]()

    def fault(name: str, *, is_of_host: bool) -> Fault:
        async def strike(victim: Victim) -> None:
            struck.append(name)

        return Fault(name, "", strike, is_of_host=is_of_host)

    monkeypatch.setattr("tests.chaos.injector.KILL", fault("kill", is_of_host=False))
    target.find("prefill-1")["address"] = "h:1" if shares else "i:1"
    cut = Planned(fault("cut", is_of_host=True), Stage.QUEUED)
    await Injector(target).run(PREFILL, iter([cut]), asyncio.Event())
    assert struck == (["kill"] if shares else ["cut"])


def a_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


async def test_the_controller_is_lost_only_when_the_cluster_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """`baton up` ends if its first controller dies before all workers are ready."""
    with a_process() as controller:
        target = FakeTarget()
        target.pids = lambda: [controller.pid]
        monkeypatch.setattr("tests.chaos.faults._is_controller", lambda process: True)
        target.find("decode-1")["state"] = "starting"
        losing = asyncio.create_task(lose_controller(target))
        assert not (await asyncio.wait({losing}, timeout=0.05))[0]
        assert controller.poll() is None
        target.find("decode-1")["state"] = "ready"
        await losing
        assert not psutil.pid_exists(controller.pid)
