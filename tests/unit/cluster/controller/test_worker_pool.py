"""Pools of Ray actors: start, replacement, scaling, and what is said when workers do not come up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import ray

from baton.core.errors import ConfigError, DeadlineError, InternalError, LayoutMismatchError, WorkerLostError
from cluster.config.config import BatonConfig
from cluster.controller import worker_pool
from cluster.controller.pool_member import short_reason
from cluster.controller.worker_pool import WorkerPool
from cluster.registry.progress_judge import Standing
from tests.credentials import SECRET
from tests.fake_hosts import (
    CrashingHost,
    DyingHost,
    FakeHost,
    FlakyHost,
    HangingHost,
    MisconfiguredHost,
)
from tests.pool_listener import ON_BOTH_RAYS, READY_S, ids_in
from tests.waiting import until


@pytest.fixture
async def make_pool(listener, a_ray):
    pools: list[WorkerPool] = []

    def make(
        actor_class: type = FakeHost, folder: Path | None = None, request_timeout_s: float = 600.0, **resources: object
    ) -> WorkerPool:
        name = str(folder) if folder else None
        config = BatonConfig.from_dict(
            {
                "decode": {"resources": resources},
                "served_model_name": name,
                "router": {"request_timeout_s": request_timeout_s},
            }
        )
        pools.append(WorkerPool("decode", config, listener, actor_class, "127.0.0.1", SECRET))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.stop()


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


@pytest.mark.parametrize("a_ray", ["real"], indirect=True)
async def test_labels_that_ray_refuses_are_a_configuration_error(make_pool):
    pool = make_pool(labels={"pool": "-not a label-"})
    pool.scale(1)
    with pytest.raises(ConfigError, match=r"decode\.resources.*not a label"):
        await pool.wait_until_ready(READY_S)


@pytest.mark.parametrize(("actor_class", "reason"), [(CrashingHost, "no luck today"), (DyingHost, r"\w")])
async def test_repeated_failures_at_start_end_the_wait_with_the_reason(make_pool, listener, actor_class, reason):
    pool = make_pool(actor_class)
    pool.scale(1)
    with pytest.raises(WorkerLostError, match=f"decode workers keep dying at start: .*{reason}"):
        await pool.wait_until_ready(READY_S)
    assert listener.gone == ["decode-1", "decode-2", "decode-3"]
    assert pool.figures().failures == {"starting": 3, "serving": 0, "hanging": 0}
    assert pool.figures().num_started == 0


@ON_BOTH_RAYS
async def test_a_worker_that_fails_once_is_restarted(make_pool, listener):
    pool = make_pool(FlakyHost)
    pool.scale(1)
    await pool.wait_until_ready(READY_S)
    assert list(listener.ready) == ["decode-2"]
    [dead] = [worker for worker in pool.status()["workers"] if worker["state"] == "dead"]
    assert dead["reason"] == "ValueError: only this once"


class UnluckyHost(FakeHost):
    """The first three fail to start, those after them do not."""

    async def start(self):
        if int(self.worker_id.split("-")[1]) <= 3:
            raise ValueError("no luck at first")
        return await super().start()


async def test_failed_starts_are_counted_per_worker(make_pool, listener):
    pool = make_pool(UnluckyHost)
    pool.scale(2)
    await pool.wait_until_ready(READY_S)
    assert sorted(listener.ready) == ["decode-4", "decode-5"]


async def test_the_pause_after_failed_starts_does_not_overflow(make_pool, monkeypatch):
    monkeypatch.setattr(worker_pool, "_MAX_BACKOFF_S", 30.0)
    pool = make_pool()
    pool._num_start_failures = 5000
    pool.scale(1)
    await asyncio.sleep(0.1)
    assert (ids_in(pool, "starting"), ids_in(pool, "dead")) == (["decode-1"], [])


async def test_a_refused_worker_is_restarted(make_pool, listener):
    listener.refuse = LayoutMismatchError("a different KV layout")
    pool = make_pool()
    pool.scale(1)
    await until(lambda: ids_in(pool, "dead") == ["decode-1"])
    listener.refuse = None
    await pool.wait_until_ready(READY_S)
    assert pool.status()["workers"][-1]["reason"] == "a different KV layout"


async def test_a_worker_that_loads_too_long_is_reported(make_pool, tmp_path):
    pool = make_pool(HangingHost, tmp_path)
    pool.scale(1)
    await until(lambda: len(list(tmp_path.iterdir())) == 1)
    with pytest.raises(
        DeadlineError, match=r"After 0\.5 s, 0 of 1 decode workers are ready. The others are still load"
    ):
        await pool.wait_until_ready(0.5)


async def test_a_worker_without_a_place_is_reported(make_pool):
    pool = make_pool(cpus=99)
    pool.scale(1)
    with pytest.raises(DeadlineError) as raised:
        await pool.wait_until_ready(0.5)
    assert "A decode worker needs 99 CPUs, 0 GPUs" in raised.value.message
    assert "too few CPUs" in raised.value.message
    assert "change decode.resources" in raised.value.message


async def test_the_reason_of_many_waiting_workers_is_reported_once(make_pool, listener, monkeypatch):
    monkeypatch.setattr(worker_pool, "_HOPELESS_NOTICE_S", 0.1)
    pool = make_pool(cpus=99)
    pool.scale(4)
    await until(lambda: all(worker.get("reason") for worker in pool.status()["workers"]))
    assert len(pool.status()["workers"]) == 4
    assert [text for text in listener.reports if "needs 99 CPUs" in text] == listener.reports[-1:]


@ON_BOTH_RAYS
@pytest.mark.parametrize("resources", [{}, {"cpus": 99}], ids=["loading", "without_place"])
async def test_stopping_while_starting_is_quick_and_leaves_nothing(make_pool, resources, a_ray):
    pool = make_pool(HangingHost, **resources)
    pool.scale(2)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):  # far less than the patience with a worker that serves
        await pool.stop()
    assert pool.status()["workers"] == []
    await until(lambda: a_ray.free_cpus() == 8)


def test_a_reason_is_one_line_and_names_exhausted_memory() -> None:
    advice = "3 worker(s) were killed due to the node running low on memory. \nRefer to the documentation on that."
    ended = "Ray ended it because its node ran out of memory; scale the pools down, or give the node more memory"
    assert short_reason(RuntimeError(advice)) == ended
    assert short_reason(ray.exceptions.OutOfMemoryError("Task was killed")) == ended
    on_gpu = "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert short_reason(RuntimeError(f"Traceback\ntorch.OutOfMemoryError: {on_gpu}")).endswith(on_gpu)
    assert short_reason(RuntimeError("Traceback\n  line\nValueError: seven")) == "ValueError: seven"
    assert short_reason(RuntimeError()) == "RuntimeError"
