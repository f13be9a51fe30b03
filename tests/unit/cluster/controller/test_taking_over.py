"""A controller that finds the router and the workers of an earlier one."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.core.errors import ConfigError
from cluster.actors import RouterActor
from cluster.config.config import BatonConfig, RayConfig
from cluster.controller.controller import Controller
from cluster.controller.survivors import (
    FoundRouter,
    FoundWorker,
    Kind,
    Survivors,
    check_configuration,
    find_survivors,
    survival_options,
)
from cluster.registry.workers import WorkerInfo
from tests.credentials import SECRET
from tests.fake_hosts import ServingHost
from tests.fake_ray import FakeRay
from tests.fake_workers import expected_tokens
from tests.tiny_tokenizers import write_model_folder
from tests.waiting import until
from tests.worker_infos import make_info


@pytest.fixture(autouse=True)
def _a_router_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.actors.do_without_torch", lambda: None)
    monkeypatch.setattr("cluster.actors.imports_that_stay", contextlib.nullcontext)
    monkeypatch.setattr("cluster.router_process.router_host.spare_pauses", lambda: None)


class Clusters:
    """Controllers that follow each other."""

    def __init__(self, fake: FakeRay, folder: Path) -> None:
        self.config = {"model": str(write_model_folder(folder)), "router": {"port": 0}}
        self._ray = fake
        self.controller: Any = None
        self.endpoint = ""

    async def start(self, survivors: Survivors | None = None, **config: Any) -> None:
        checked = BatonConfig.from_dict({**self.config, **config}).to_dict()
        actor_class = self._ray.remote(Controller).options(num_cpus=0, max_concurrency=100)
        self.controller = actor_class.remote(checked, ServingHost, None, survivors)
        self.endpoint = await self.controller.start.remote()

    async def lose_controller(self) -> Survivors:
        [lost] = self._ray.instances(Controller)
        self._ray.kill(self.controller)
        for pool in lost._pools.values():  # the end of a real process ends its tasks
            for member in pool._members.values():
                member.task.cancel()
        routers, workers = [], []
        for actor in self._ray.actors(RouterActor):
            described = await actor.describe.remote()
            routers.append(FoundRouter(actor, described["endpoint"], described["port"]))
        for actor in self._ray.actors(ServingHost):
            described = await actor.describe.remote()
            config = BatonConfig.from_dict(described["config"])
            workers.append(FoundWorker(actor, WorkerInfo.from_dict(described["info"]), config))
        return Survivors(described["secret"], tuple(routers), tuple(workers))

    async def pools(self) -> dict[str, dict[str, tuple[str, int]]]:
        """Worker id → (state, process) by pool."""
        pools = await self.controller.pool_status.remote()
        return {
            name: {worker["id"]: (worker["state"], worker.get("pid", 0)) for worker in pool["workers"]}
            for name, pool in pools.items()
        }

    async def ask(self, path: str, body: Any = None) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.endpoint, timeout=60) as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    async def complete(self) -> list[int]:
        body = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 5, "return_token_ids": True}
        return (await self.ask("/v1/completions", body)).json()["choices"][0]["token_ids"]


@pytest.fixture
async def clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    fake = FakeRay(8)
    fake.install(monkeypatch)
    found = Clusters(fake, tmp_path)
    yield found
    await found.controller.stop.remote()
    fake.kill(found.controller)
    assert fake.free_cpus() == 8
    await fake.close()


async def test_the_next_controller_uses_the_same_router_and_workers(clusters: Clusters) -> None:
    await clusters.start(decode={"workers": 2})
    endpoint, before = clusters.endpoint, await clusters.pools()
    survivors = await clusters.lose_controller()

    assert await clusters.complete() == expected_tokens(5)
    answer = await clusters.ask("/admin/status")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "controller_lost")
    assert (await clusters.ask("/metrics")).status_code == 200

    await clusters.start(survivors)  # with one decode worker, but the pool had been scaled
    assert clusters.endpoint == endpoint
    assert await clusters.pools() == before
    assert await clusters.complete() == expected_tokens(5)
    assert (await clusters.ask("/admin/status")).json()["pools"]["decode"]["target"] == 2

    await clusters.controller.scale.remote({"decode": 3})

    async def has_three() -> bool:
        return list((await clusters.pools())["decode"]) == ["decode-1", "decode-2", "decode-3"]

    await until(has_three)


async def test_lost_controllers_leave_no_open_calls_of_routers(clusters: Clusters) -> None:
    """Ray would keep a connection open for each of them."""
    await clusters.start()
    [router] = clusters._ray.actors(RouterActor)
    await until(lambda: router.num_open_calls == 1)
    for _ in range(3):
        await clusters.start(await clusters.lose_controller())
        await until(lambda: router.num_open_calls == 1)


async def test_workers_that_died_meanwhile_are_replaced(clusters: Clusters) -> None:
    await clusters.start()
    survivors = await clusters.lose_controller()
    lost = next(worker for worker in survivors.workers if worker.info.pool == "decode")
    clusters._ray.kill(lost.actor)
    left = tuple(worker for worker in survivors.workers if worker is not lost)
    await clusters.start(Survivors(survivors.secret, survivors.routers, left))
    assert [(state, pid != lost.info.pid) for state, pid in (await clusters.pools())["decode"].values()] == [
        ("ready", True)
    ]
    assert await clusters.complete() == expected_tokens(5)


@pytest.mark.parametrize("is_found", [True, False])
async def test_a_router_that_died_meanwhile_is_started_beside_the_same_workers(
    clusters: Clusters, is_found: bool
) -> None:
    await clusters.start()
    before = await clusters.pools()
    survivors = await clusters.lose_controller()
    [router] = survivors.routers
    await router.actor.stop.remote()
    clusters._ray.kill(router.actor)
    await asyncio.sleep(0)
    await clusters.start(Survivors(survivors.secret, survivors.routers if is_found else (), survivors.workers))
    assert await clusters.pools() == before
    assert await clusters.complete() == expected_tokens(5)


async def test_what_an_interrupted_upgrade_has_left_is_finished(clusters: Clusters) -> None:
    await clusters.start(decode={"workers": 2})
    survivors = await clusters.lose_controller()
    changed = BatonConfig.from_dict({**clusters.config, "decode": {"workers": 2, "chunk_tokens": 64}})
    workers = tuple(
        replace(worker, config=changed) if worker.info.worker_id == "decode-2" else worker
        for worker in survivors.workers
    )
    await clusters.start(replace(survivors, workers=workers), decode={"workers": 2})

    async def is_replaced() -> bool:
        return list((await clusters.pools())["decode"]) == ["decode-1", "decode-3"]

    await until(is_replaced)
    assert list((await clusters.pools())["prefill"]) == ["prefill-1"]
    assert await clusters.complete() == expected_tokens(5)


async def test_an_interrupted_change_of_the_layout_is_undone_without_a_gap(clusters: Clusters) -> None:
    """The prefill worker had been replaced, and the spare decode worker was there: one pair of each layout."""
    await clusters.start(decode={"workers": 2})
    survivors = await clusters.lose_controller()
    changed = BatonConfig.from_dict({**clusters.config, "engine": {"kv_cache": "int8"}})
    workers = tuple(
        worker
        if worker.info.worker_id == "decode-1"
        else replace(worker, config=changed, info=replace(worker.info, kv_fingerprint="int8"))
        for worker in survivors.workers
    )
    await clusters.start(replace(survivors, workers=workers))
    assert await clusters.complete() == expected_tokens(5)

    async def is_undone() -> bool:
        pools = await clusters.pools()
        return {name: list(pool) for name, pool in pools.items()} == {"prefill": ["prefill-2"], "decode": ["decode-1"]}

    await until(is_undone)
    status = (await clusters.ask("/admin/status")).json()
    assert [pool["target"] for pool in status["pools"].values()] == [1, 1]
    assert await clusters.complete() == expected_tokens(5)


def test_workers_of_an_interrupted_upgrade_may_differ_where_they_can_be_replaced() -> None:
    new = BatonConfig.from_dict({"decode": {"kv_blocks": 64}})
    check_configuration(new, BatonConfig(), is_replaceable=True)
    other = BatonConfig.from_dict({"decode": {"kv_blocks": 64}, "routing": {"picker": "random"}})
    with pytest.raises(ConfigError, match=r"another configuration: routing\.picker\."):
        check_configuration(other, BatonConfig(), is_replaceable=True)


@pytest.mark.parametrize(("upgraded", "found_with"), [((), 32), ((0,), 64), ((0, 1), 64)])
def test_an_interrupted_upgrade_of_routers_is_that_of_the_first(
    upgraded: tuple[int, ...], found_with: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade reloads one router after the other."""

    def config(num_blocks: int) -> BatonConfig:
        return BatonConfig.from_dict({"decode": {"kv_blocks": num_blocks}, "router": {"replicas": 2}})

    def described(index: int) -> dict[str, Any]:
        own = config(64 if index in upgraded else 32).to_dict()
        return {"config": own, "secret": SECRET, "endpoint": "http://here:1", "port": 1, "index": index}

    found = [(Kind.ROUTER, None, described(index)) for index in (1, 0)]
    monkeypatch.setattr("cluster.controller.survivors._describe", lambda namespace: found)
    survivors = find_survivors(config(found_with))
    assert survivors is not None
    assert len(survivors.routers) == 2
    with pytest.raises(ConfigError, match=r"another configuration: decode\.kv_blocks"):
        find_survivors(config(96 - found_with))


def test_another_configuration_is_refused_unless_it_can_be_changed() -> None:
    running = BatonConfig.from_dict({"decode": {"kv_blocks": 64}})
    same = {"decode": {"kv_blocks": 64, "workers": 3}, "slo": {"classes": {"batch": {"ttft": "9s"}}}}
    check_configuration(running, BatonConfig.from_dict(same))
    with pytest.raises(ConfigError, match=r"another configuration: decode\.kv_blocks, dtype\..*`baton down` first"):
        check_configuration(running, BatonConfig.from_dict({"decode": {"kv_blocks": 32}, "dtype": "float32"}))


def test_actors_outlive_their_controller() -> None:
    options = survival_options(RayConfig(namespace="mine"), Kind.WORKER)
    assert options["name"].startswith("baton-worker-")
    assert {**options, "name": ""} == {"name": "", "namespace": "mine", "lifetime": "detached"}


def test_workers_are_taken_over_in_the_order_of_their_numbers() -> None:
    workers = [FoundWorker(None, make_info(f"decode-{number}", "decode"), BatonConfig()) for number in (10, 2, 1)]
    found = Survivors(SECRET, (), tuple(workers)).of_pool("decode")
    assert [worker.info.worker_id for worker in found] == ["decode-1", "decode-2", "decode-10"]
