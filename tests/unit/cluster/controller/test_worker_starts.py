"""Workers that do not come up: what a pool does about them, and what it says."""

from __future__ import annotations

import asyncio

import pytest
import ray

from baton.core.errors import ConfigError, DeadlineError, LayoutMismatchError, WorkerLostError
from cluster.config.config import RayConfig
from cluster.controller import pool_member, worker_pool
from cluster.controller.ray_errors import logged, short_reason
from tests.fake_hosts import (
    CrashingHost,
    DyingHost,
    FakeHost,
    FlakyHost,
    HangingHost,
    SilentHost,
)
from tests.pool_listener import ON_BOTH_RAYS, READY_S, ids_in
from tests.waiting import until


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
    with pytest.raises(WorkerLostError, match=f"(?s)3 starts of decode workers .* in a row:.*decode-3: .*{reason}"):
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


async def test_each_reason_of_failed_starts_is_named_once(make_pool):
    class VaryingHost(FakeHost):
        async def start(self):
            raise ValueError("no disk" if self.worker_id == "decode-2" else "no luck")

    pool = make_pool(VaryingHost)
    pool.scale(1)
    with pytest.raises(WorkerLostError) as raised:
        await pool.wait_until_ready(READY_S)
    assert raised.value.message.splitlines() == [
        "3 starts of decode workers have failed in a row:",
        "  decode-1, decode-3: ValueError: no luck",
        "  decode-2: ValueError: no disk",
    ]


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


@ON_BOTH_RAYS
async def test_a_worker_whose_process_hangs_while_it_loads_is_replaced(make_pool, listener, a_ray, monkeypatch):
    monkeypatch.setattr(pool_member, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(RayConfig, "attempt_timeout_s", 1.0)
    num_free = a_ray.free_cpus()
    pool = make_pool(SilentHost)
    pool.scale(1)
    await pool.wait_until_ready(READY_S)
    assert list(listener.ready) == ["decode-2"]
    [dead] = [worker for worker in pool.status()["workers"] if worker["state"] == "dead"]
    assert dead["reason"] == "its process has been silent for 1 s"
    assert pool.figures().failures == {"starting": 1, "serving": 0, "hanging": 0}
    assert [line for line in listener.reports if "silent" in line] == [
        "decode-1 could not be started: its process has been silent for 1 s"
    ]
    await until(lambda: a_ray.free_cpus() == num_free - 1)


async def test_earlier_failures_are_no_reason_of_a_later_wait(make_pool, tmp_path):
    pool = make_pool(FlakyHost)
    pool.scale(1)
    await pool.wait_until_ready(READY_S)
    assert "only this once" in str(pool.status())
    pool._actor_class = HangingHost
    pool.scale(2)
    with pytest.raises(DeadlineError) as raised:
        await pool.wait_until_ready(0.5)
    assert "only this once" not in raised.value.message
    assert "still loading" in raised.value.message


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


@pytest.mark.parametrize("a_ray", ["simulated"], indirect=True)
async def test_a_worker_waits_for_its_node_without_failing_or_being_asked_for_again(make_pool, a_ray, monkeypatch):
    monkeypatch.setattr(worker_pool, "_HOPELESS_NOTICE_S", 0.0)
    pool = make_pool(cpus=20)
    pool.scale(1)
    await until(lambda: all(worker["reason"] for worker in pool.status()["workers"]))
    [waiting] = pool.status()["workers"]
    assert (waiting["state"], waiting["is_pending"]) == ("starting", True)
    assert pool.counts().pending == 1
    pool.scale(1)  # the autoscaler plans the same size again and again
    a_ray.add_cpus(20)
    await pool.wait_until_ready(READY_S)
    [ready] = pool.status()["workers"]
    assert (ready["id"], ready["reason"], ready["is_pending"]) == (waiting["id"], "", False)
    assert pool.figures().failures == {"starting": 0, "serving": 0, "hanging": 0}
    await pool.stop()
    a_ray.add_cpus(-20)


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
    unavailable = ray.exceptions.ActorUnavailableError("RpcError: Socket closed rpc_code: 14", None)
    assert short_reason(unavailable) == "Ray does not reach its process"
    on_gpu = "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert short_reason(RuntimeError(f"Traceback\ntorch.OutOfMemoryError: {on_gpu}")).endswith(on_gpu)
    assert short_reason(RuntimeError("Traceback\n  line\nValueError: seven")) == "ValueError: seven"
    assert short_reason(RuntimeError()) == "RuntimeError"


def test_logs_have_remote_tracebacks_and_no_advice_of_ray() -> None:
    advice = "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer."
    unavailable = ray.exceptions.ActorUnavailableError(f"the connection was closed. {advice}", None)
    assert "root causes" not in logged(unavailable)
    assert "the connection was closed" in logged(unavailable)
    assert logged(ray.exceptions.ActorDiedError()) == "its process died"
    assert logged(RuntimeError("Traceback\n  line\nValueError: seven")).startswith("Traceback")
