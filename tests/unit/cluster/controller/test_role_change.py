"""A worker's change between pools: its conditions, and that no worker is lost or counted twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.core.errors import InvalidRequestError
from baton.core.roles import DECODE, PREFILL
from cluster.config.config import BatonConfig
from cluster.controller.controller import Controller
from cluster.controller.pool_member import ChangeOrigin
from cluster.controller.worker_pool import WorkerPool
from tests.credentials import SECRET
from tests.fake_hosts import FakeHost, UnchangingHost
from tests.pool_listener import READY_S, ids_in
from tests.waiting import until
from tests.worker_infos import make_info


async def test_a_draft_only_on_decode_workers_prevents_role_changes(a_ray):
    controller = Controller(BatonConfig.from_dict({"speculation": {"draft_on_prefill": False}}).to_dict(), FakeHost)
    try:
        await controller.worker_ready(make_info("prefill-1", PREFILL))
        assert (await controller.pool_counts())[1] == ""
        await controller.worker_ready(make_info("decode-1", DECODE, draft_method="eagle3"))
        assert "speculation.draft_on_prefill" in (await controller.pool_counts())[1]
    finally:
        await controller.stop()


class TestPools:
    """Both pools, with actors that have no model."""

    @pytest.fixture
    async def start(self, listener, a_ray):
        pools: list[WorkerPool] = []

        async def start(prefill: int, decode: int, actor_class: type = FakeHost, cpus: float = 1.0) -> list[WorkerPool]:
            config = BatonConfig.from_dict({name: {"resources": {"cpus": cpus}} for name in (PREFILL, DECODE)})
            for name, size in ((PREFILL, prefill), (DECODE, decode)):
                pools.append(WorkerPool(name, config, listener, actor_class, "127.0.0.1", SECRET))
                pools[-1].scale(size)
            await asyncio.gather(*(pool.wait_until_ready(READY_S) for pool in pools))
            return pools

        yield start
        for pool in pools:
            await pool.stop()

    async def test_a_drained_worker_continues_in_the_other_pool_in_the_same_process(self, start, listener):
        prefill, decode = await start(2, 1)
        pid = listener.ready["prefill-2"].pid
        decode.change_role_from(prefill, ChangeOrigin.OPERATOR)
        assert (prefill.target, decode.target) == (1, 2)
        assert [(counts.ready, counts.starting, counts.draining) for counts in (prefill.counts(), decode.counts())] == [
            (1, 0, 0),
            (1, 1, 0),
        ]
        await asyncio.sleep(0.1)
        assert listener.gone == []  # it serves until it is drained
        [waiting] = [worker for worker in decode.status()["workers"] if worker["id"] == "decode-2"]
        assert waiting["reason"] == "replaces prefill-2 once it is drained"
        listener.may_drain.set()
        await decode.wait_until_ready(READY_S)
        assert listener.gone == ["prefill-2"]
        assert listener.ready["decode-2"].pid == pid
        assert listener.ready["decode-2"].pool == DECODE
        assert (ids_in(prefill, "ready"), ids_in(decode, "ready")) == (["prefill-1"], ["decode-1", "decode-2"])
        assert decode.counts().role_change_s is not None
        assert decode.figures().failures == {"starting": 0, "serving": 0, "hanging": 0}

        prefill.change_role_from(decode, ChangeOrigin.AUTOSCALER)  # and back, with a name of its own
        await prefill.wait_until_ready(READY_S)
        assert listener.ready["prefill-3"].pid == pid
        assert decode.figures().role_changes == {"autoscaler": 0, "operator": 1}
        assert prefill.figures().role_changes == {"autoscaler": 1, "operator": 0}

    async def test_a_worker_that_dies_while_changing_is_replaced(self, start, listener, a_ray):
        prefill, decode = await start(2, 0)
        pid = listener.ready["prefill-2"].pid
        decode.change_role_from(prefill, ChangeOrigin.OPERATOR)
        a_ray.kill_process(pid)
        await decode.wait_until_ready(READY_S)
        assert listener.ready["decode-1"].pid != pid
        assert (prefill.target, decode.target) == (1, 1)

    async def test_a_worker_that_cannot_change_is_replaced(self, start, listener):
        prefill, decode = await start(2, 0, UnchangingHost)
        pid = listener.ready["prefill-2"].pid
        listener.may_drain.set()
        decode.change_role_from(prefill, ChangeOrigin.OPERATOR)
        await decode.wait_until_ready(READY_S)
        assert ids_in(decode, "ready") == ["decode-2"]
        assert listener.ready["decode-2"].pid != pid

    async def test_an_unneeded_role_change_ends_with_the_drain(self, start, listener):
        prefill, decode = await start(2, 0)
        decode.change_role_from(prefill, ChangeOrigin.OPERATOR)
        decode.scale(0)
        await until(lambda: decode.status()["workers"] == [])
        listener.may_drain.set()
        await until(lambda: len(prefill.status()["workers"]) == 1)
        assert (prefill.counts().ready, decode.counts().ready) == (1, 0)
        assert sorted(listener.ready) == ["prefill-1"]

    async def test_a_changed_worker_replaces_a_pending_one_and_the_last_one_stays(self, start, listener):
        prefill, decode = await start(2, 0, cpus=3.0)
        pid = listener.ready["prefill-2"].pid
        decode.scale(1)
        await until(lambda: decode.counts().pending == 1)
        decode.change_role_from(prefill, ChangeOrigin.AUTOSCALER)
        decode.scale(1)  # what the autoscaler wants is the one, not the other
        listener.may_drain.set()
        await decode.wait_until_ready(READY_S)
        assert ids_in(decode, "ready") == ["decode-2"]
        assert listener.ready["decode-2"].pid == pid
        await until(lambda: len(decode.status()["workers"]) == 1)
        assert (prefill.target, decode.target) == (1, 1)

        # The last one stays.
        with pytest.raises(InvalidRequestError, match=r"pool prefill cannot give up a worker.*one must stay"):
            decode.change_role_from(prefill, ChangeOrigin.OPERATOR)
        assert (prefill.target, decode.target) == (1, 1)


async def test_the_autoscaler_does_not_change_a_pinned_pool(a_ray):
    controller = Controller(BatonConfig.from_dict({"autoscaler": {"enabled": True}}).to_dict(), FakeHost)
    try:
        await controller.autoscale({PREFILL: 2, DECODE: 1}, None)
        await until(lambda: len(ids_of(controller, PREFILL)) == 2 and len(ids_of(controller, DECODE)) == 1)
        await controller.autoscale({PREFILL: 1, DECODE: 2}, (PREFILL, DECODE))
        await until(lambda: ids_of(controller, DECODE) == ["decode-1", "decode-2"])
        assert ids_of(controller, PREFILL) == ["prefill-1"]

        assert (await controller.scale({DECODE: 1}))[DECODE]["pinned"]
        await controller.autoscale({PREFILL: 2, DECODE: 3}, (DECODE, PREFILL))
        counts, obstacle = await controller.pool_counts()
        assert [(counts[name].target, counts[name].pinned) for name in (PREFILL, DECODE)] == [(2, False), (1, True)]
        assert obstacle == ""
        assert "pinned" not in (await controller.scale({DECODE: None}))[DECODE]
        await controller.autoscale({PREFILL: 2, DECODE: 2}, None)
        assert controller.pools()[DECODE]["target"] == 2
        await controller.change_role(DECODE, PREFILL)
        figures, _ = await controller.figures()
        assert figures[DECODE].role_changes == {"autoscaler": 1, "operator": 0}
        assert figures[PREFILL].role_changes == {"autoscaler": 0, "operator": 1}
    finally:
        await controller.stop()


async def test_without_an_autoscaler_pools_are_never_pinned(a_ray):
    controller = Controller(BatonConfig.from_dict({}).to_dict(), FakeHost)
    try:
        assert "pinned" not in (await controller.scale({DECODE: 1}))[DECODE]
        with pytest.raises(InvalidRequestError, match=r"decode=auto needs the autoscaler, which is off"):
            await controller.scale({DECODE: None})
        with pytest.raises(InvalidRequestError, match="name two different pools"):
            await controller.change_role(DECODE, DECODE)
    finally:
        await controller.stop()


def ids_of(controller: Controller, pool: str) -> list[str]:
    return [worker["id"] for worker in controller.pools()[pool]["workers"] if worker["state"] == "ready"]


def test_fake_hosts_match_real_ones():
    """Otherwise the tests above would not apply to real processes."""
    from cluster.worker.worker_host import WorkerHost

    def methods(cls: type) -> set[str]:
        return {name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}

    missing: Any = methods(WorkerHost) - methods(FakeHost)
    assert missing == set()
