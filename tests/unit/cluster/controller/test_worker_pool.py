"""Pools of Ray actors: start, replacement, scaling, and what is said when workers do not come up."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import ConfigError, InternalError
from cluster.registry.progress_judge import Standing
from tests.fake_hosts import (
    FakeHost,
    HangingHost,
    MisconfiguredHost,
)
from tests.pool_listener import ON_BOTH_RAYS, READY_S, ids_in
from tests.waiting import until


@ON_BOTH_RAYS
async def test_a_pool_starts_replaces_and_stops_its_workers(make_pool, listener, a_ray):
    pool = make_pool()
    pool.scale(2)
    assert ids_in(pool, "starting") == ["decode-1", "decode-2"]
    await pool.wait_until_ready(READY_S)
    assert sorted(listener.ready) == ids_in(pool, "ready") == ["decode-1", "decode-2"]
    assert any("decode-1 is ready" in line for line in listener.reports)
    assert pool.status()["target"] == 2

    a_ray.kill_process(listener.ready["decode-1"].pid)
    await until(lambda: "decode-3" in listener.ready)
    assert listener.gone == ["decode-1"]  # the router is told
    assert ids_in(pool, "ready") == ["decode-2", "decode-3"]
    assert ids_in(pool, "dead") == ["decode-1"]
    assert any("decode-1 is lost: " in line for line in listener.reports)
    [dead] = [worker for worker in pool.status()["workers"] if worker["id"] == "decode-1"]
    assert dead["reason"]

    pids = [info.pid for info in listener.ready.values()]
    await pool.stop()
    await until(lambda: not any(a_ray.runs(pid) for pid in pids))
    assert (pool.status()["target"], ids_in(pool, "dead")) == (0, ["decode-1"])
    assert len(pool.status()["workers"]) == 1  # no others were started
    await until(lambda: a_ray.free_cpus() == 8)


class HostOnTwoNodes(FakeHost):
    """The first worker is on another node than the others."""

    async def start(self):
        return await super().start() | {"node_id": "first" if self.worker_id.endswith("-1") else "second"}


async def test_workers_of_a_leaving_node_are_drained_and_replaced(make_pool, listener):
    pool = make_pool(HostOnTwoNodes)
    pool.scale(2)
    await pool.wait_until_ready(READY_S)
    for _ in range(3):  # it is told again and again
        pool.leave_node("first")
    await until(lambda: listener.drain_timeouts_s)
    assert ids_in(pool, "draining") == ["decode-1"]
    await until(lambda: "decode-3" in listener.ready)  # requests of the first one still run
    listener.may_drain.set()
    await until(lambda: listener.gone == ["decode-1"])
    assert ids_in(pool, "ready") == ["decode-2", "decode-3"]
    assert [line for line in listener.reports if "its node leaves" in line] == [
        "decode-1 is drained, since its node leaves the cluster"
    ]


async def test_scaling_up_and_down_is_counted(make_pool, listener, a_ray):
    pool = make_pool()
    listener.may_drain.set()
    pool.scale(1)
    assert pool.figures().scale_events == {"up": 0, "down": 0}  # its first size is no change
    assert pool.figures().states == {"starting": 1, "ready": 0, "suspected": 0, "draining": 0}
    await pool.wait_until_ready(READY_S)
    pool.scale(3)
    pool.scale(3)
    await pool.wait_until_ready(READY_S)
    pool.scale(1)
    await until(lambda: len(listener.gone) == 2)
    await until(lambda: len(pool.status()["workers"]) == 1)
    assert sorted(listener.drained) == sorted(listener.gone)
    assert "decode-1" in listener.ready  # the oldest stays
    assert ids_in(pool, "dead") == []  # leaving is no death
    assert pool.figures().failures == {"starting": 0, "serving": 0, "hanging": 0}  # who was asked to leave is none

    a_ray.kill_process(listener.ready["decode-1"].pid)
    await until(lambda: "decode-4" in listener.ready and pool.num_ready == 1)
    figures = pool.figures()
    assert (figures.target, figures.num_started) == (1, 4)
    assert figures.scale_events == {"up": 1, "down": 1}
    assert figures.failures == {"starting": 0, "serving": 1, "hanging": 0}
    assert figures.states == {"starting": 0, "ready": 1, "suspected": 0, "draining": 0}


async def test_a_leaving_worker_lives_until_it_is_drained(make_pool, listener, a_ray):
    pool = make_pool(request_timeout_s=7200.0)
    pool.scale(2)
    await pool.wait_until_ready(READY_S)
    leaving = listener.ready["decode-2"]
    pool.scale(1)
    await until(lambda: ids_in(pool, "draining") == ["decode-2"])
    assert a_ray.runs(leaving.pid)
    assert listener.gone == []
    assert listener.drain_timeouts_s == [7200.0]
    listener.may_drain.set()
    await until(lambda: listener.gone == ["decode-2"])
    await until(lambda: not a_ray.runs(leaving.pid))


class OnceBrokenHost(FakeHost):
    """The engine of the first one ends while it serves, as when its device is lost; its process lives on."""

    async def wait(self) -> None:
        if self.worker_id.endswith("-1"):
            raise InternalError(f"the engine of {self.worker_id} failed; see its log")
        await super().wait()


async def test_a_worker_with_a_failed_engine_is_replaced_by_another_process(make_pool, listener, a_ray):
    pool = make_pool(OnceBrokenHost)
    pool.scale(1)
    await until(lambda: "decode-2" in listener.ready)
    assert listener.gone == ["decode-1"]
    assert any("the engine of decode-1 failed" in line for line in listener.reports)
    [dead] = [worker for worker in pool.status()["workers"] if worker["state"] == "dead"]
    assert dead["pid"] != listener.ready["decode-2"].pid
    await until(lambda: not a_ray.runs(dead["pid"]))


class NeverStoppingHost(FakeHost):
    """Does not answer when it is asked to stop, as if its process were stopped."""

    async def stop(self) -> None:
        raise AssertionError("a worker that hangs must not be asked to stop")


SILENCE = "it has not answered for 3.0 s"


async def test_a_suspected_worker_is_shown_with_the_reason_until_it_recovers(make_pool, listener, a_ray):
    pool = make_pool()
    pool.scale(1)
    await pool.wait_until_ready(READY_S)
    pool.judged("decode-1", Standing.SUSPECTED, SILENCE)
    [worker] = pool.status()["workers"]
    assert (worker["state"], worker["reason"]) == ("suspected", SILENCE)
    assert (pool.num_ready, pool.figures().states["suspected"]) == (0, 1)
    pool.judged("decode-1", Standing.TRUSTED, "")
    [worker] = pool.status()["workers"]
    assert (worker["state"], worker["reason"]) == ("ready", "")
    pool.judged("decode-9", Standing.SUSPECTED, "it left meanwhile")


async def test_a_lost_worker_is_replaced_without_waiting_for_it(make_pool, listener, a_ray):
    pool = make_pool(NeverStoppingHost)
    pool.scale(1)
    await pool.wait_until_ready(READY_S)
    frozen = listener.ready["decode-1"]
    for standing in (Standing.SUSPECTED, Standing.LOST):
        pool.judged("decode-1", standing, SILENCE)
    await until(lambda: "decode-2" in listener.ready)
    assert listener.gone == ["decode-1"]
    assert not a_ray.runs(frozen.pid)
    assert f"decode-1 is lost: {SILENCE}" in listener.reports
    assert pool.figures().failures == {"starting": 0, "serving": 0, "hanging": 1}
    pool.judged("decode-2", Standing.LOST, SILENCE)
    await until(lambda: "decode-3" in listener.ready)
    pool.judged("decode-3", Standing.LOST, SILENCE)


async def test_a_draining_worker_that_hangs_is_not_waited_for(make_pool, listener, a_ray):
    pool = make_pool(NeverStoppingHost)
    pool.scale(2)
    await pool.wait_until_ready(READY_S)
    pool.scale(1)
    await until(lambda: ids_in(pool, "draining") == ["decode-2"])
    for standing in (Standing.SUSPECTED, Standing.LOST):
        pool.judged("decode-2", standing, SILENCE)
    await until(lambda: listener.gone == ["decode-2"])
    assert ids_in(pool, "ready") == ["decode-1"]
    pool.judged("decode-1", Standing.LOST, SILENCE)


async def test_a_draining_worker_that_dies_is_not_replaced(make_pool, listener, a_ray):
    pool = make_pool()
    pool.scale(2)
    await pool.wait_until_ready(READY_S)
    pool.scale(1)
    await until(lambda: ids_in(pool, "draining") == ["decode-2"])
    a_ray.kill_process(listener.ready["decode-2"].pid)
    await until(lambda: listener.gone == ["decode-2"])
    await until(lambda: ids_in(pool, "draining") == [])
    assert list(listener.ready) == ids_in(pool, "ready") == ["decode-1"]
    assert ids_in(pool, "starting") == []


async def test_scaling_down_drops_workers_that_are_still_starting(make_pool, listener):
    pool = make_pool(HangingHost)
    pool.scale(3)
    pool.scale(1)
    await until(lambda: ids_in(pool, "starting") == ["decode-1"])
    assert sorted(listener.gone) == ["decode-2", "decode-3"]
    assert listener.drained == []


async def test_scaling_down_drops_workers_without_a_place(make_pool, listener):
    pool = make_pool(cpus=6)
    pool.scale(2)
    await until(lambda: len(listener.ready) == 1)
    pool.scale(1)
    await until(lambda: len(pool.status()["workers"]) == 1)
    assert len(ids_in(pool, "ready")) == 1


async def test_scaling_up_while_starting_waits_for_all_workers(make_pool, listener):
    pool = make_pool()
    pool.scale(1)
    waiting = asyncio.create_task(pool.wait_until_ready(READY_S))
    await asyncio.sleep(0)
    pool.scale(2)
    await waiting
    assert len(listener.ready) == 2


async def test_a_wrong_configuration_ends_the_wait_without_a_retry(make_pool, listener):
    pool = make_pool(MisconfiguredHost)
    pool.scale(1)
    with pytest.raises(ConfigError, match="context length is 9"):
        await pool.wait_until_ready(READY_S)
    await until(lambda: listener.gone == ["decode-1"])
    assert ids_in(pool, "starting") == []
    assert ids_in(pool, "dead") == ["decode-1"]
    pool.scale(1)  # asking again is trying again
    await until(lambda: ids_in(pool, "dead") == ["decode-1", "decode-2"])


class CompilingHost(FakeHost):
    """Reports progress, and is ready when the last line was fetched."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._lines = ["compiling: 1", "compiling: 2"]
        self._told = asyncio.Event()

    async def start(self):
        await self._told.wait()
        return await super().start()

    async def next_progress(self):
        if self._lines:
            return self._lines.pop(0)
        self._told.set()
        return await asyncio.Event().wait()


async def test_progress_of_a_starting_worker_reaches_the_user(make_pool, listener):
    pool = make_pool(CompilingHost)
    pool.scale(1)
    await pool.wait_until_ready(READY_S)
    assert listener.reports[:2] == ["compiling: 1", "compiling: 2"]


class OnceMisconfiguredHost(FakeHost):
    """The second one finds something wrong on its node."""

    async def start(self):
        if self.worker_id.endswith("-2"):
            raise ConfigError("not on this node.")
        return await super().start()


async def test_a_configuration_error_of_a_later_worker_does_not_end_the_pool(make_pool, listener, a_ray):
    pool = make_pool(OnceMisconfiguredHost)
    pool.scale(1)
    await pool.wait_until_ready(READY_S)
    a_ray.kill_process(listener.ready["decode-1"].pid)
    await until(lambda: "decode-3" in listener.ready)
    [failed] = [worker for worker in pool.status()["workers"] if worker["id"] == "decode-2"]
    assert failed["reason"] == "not on this node."
