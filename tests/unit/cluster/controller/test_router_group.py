"""Routers that are replaced have the place, and so the share of the limits, of those that died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.core.errors import ConfigError, WorkerLostError
from cluster.config import config as config_module
from cluster.config.config import BatonConfig
from cluster.controller import router_group
from cluster.controller.router_group import RouterGroup
from cluster.gateway.api_keys import ApiKeys, Share
from tests.fake_hosts import ProcessExit
from tests.fake_ray import FakeRay
from tests.waiting import until

KEY = "a-key-of-sixteen-characters"
LIMIT = 10


class StubRouter:
    """A router that knows its keys and serves nothing.

    Attributes:
        may_start: routers wait for it before they have started.
        num_refused: so many routers find their port in use.
        hangs: whether the router has ceased to answer.
    """

    may_start: asyncio.Event
    num_refused = 0

    def __init__(self, config: dict[str, Any], port: int, controller: Any, secret: bytes, variables: Any, index: int):
        self.index = index
        self.hangs = False
        self.reload(config)

    async def start(self) -> tuple[str, int]:
        await self.may_start.wait()
        if StubRouter.num_refused:
            StubRouter.num_refused -= 1
            raise ConfigError("Cannot listen on router.host 127.0.0.1 port 8000: Address already in use.")
        return "http://127.0.0.1:1", 1

    def reload(self, config: dict[str, Any]) -> None:
        router = BatonConfig.from_dict(config).router
        self.keys = ApiKeys(router.api_keys, Share(self.index, router.replicas))

    @property
    def limit(self) -> int:
        found = self.keys.find(f"Bearer {KEY}").limits.max_concurrent
        assert found is not None
        return found

    def meet(self, routers: dict[int, Any]) -> None:
        pass

    def stop(self) -> None:
        pass

    async def beat(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()

    async def wait(self) -> None:
        await asyncio.Event().wait()


def config(limit: int) -> BatonConfig:
    keys = [{"name": "one", "key": KEY, "max_concurrent": limit}]
    times = {"suspect_after": 0.1, "replace_after": 0.2}
    return BatonConfig.from_dict({"router": {"port": 0, "replicas": 3, "api_keys": keys}, "liveness": times})


def installed(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A Ray of the test, whose routers are stubs that may start."""
    ray = FakeRay(8)
    ray.install(monkeypatch)
    monkeypatch.setattr(router_group, "RouterActor", StubRouter)
    monkeypatch.setattr(FakeRay, "current_actor", None)
    StubRouter.may_start = asyncio.Event()
    StubRouter.may_start.set()
    return ray


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, reports: list[str] | None = None
) -> AsyncIterator[tuple[FakeRay, RouterGroup]]:
    ray = installed(monkeypatch)
    group = RouterGroup(config(LIMIT), b"", {}, [].append if reports is None else reports.append)
    await group.start()
    watching = asyncio.create_task(group.watch())
    try:
        yield ray, group
    finally:
        watching.cancel()
        await group.stop()


def limits(ray: FakeRay) -> list[int]:
    return sorted(router.limit for router in ray.instances(StubRouter))


async def kill_one(ray: FakeRay) -> None:
    ray.actors(StubRouter)[1].die(router_group.RayActorError())
    await asyncio.sleep(0.01)


async def test_the_shares_add_up_after_a_router_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as (ray, group):
        assert limits(ray) == [3, 3, 4]
        await kill_one(ray)
        await until(lambda: len(limits(ray)) == 3 and group.num_restarts == 1)
        assert limits(ray) == [3, 3, 4]


async def test_a_router_that_starts_during_a_reload_has_the_new_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as (ray, group):
        StubRouter.may_start.clear()
        await kill_one(ray)
        await until(lambda: len(ray.instances(StubRouter)) == 3)  # it has read the old configuration
        await group.reload(config(20))
        StubRouter.may_start.set()
        await until(lambda: limits(ray) == [6, 7, 7])


async def test_a_router_that_starts_after_a_reload_has_the_new_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as (ray, group):
        await group.reload(config(30))
        assert limits(ray) == [10, 10, 10]
        await kill_one(ray)
        await until(lambda: limits(ray) == [10, 10, 10])


async def test_routers_wait_for_the_port_of_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_group, "_RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(StubRouter, "num_refused", 2)
    ray = installed(monkeypatch)
    with pytest.raises(ConfigError, match="Address already in use"):
        await RouterGroup(config(LIMIT), b"", {}, [].append).start()
    group = RouterGroup(config(LIMIT), b"", {}, [].append)
    assert await group.start(follows_others=True) == "http://127.0.0.1:1"
    assert limits(ray) == [3, 3, 4]
    await group.stop()


async def test_a_router_lost_in_the_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_group, "_RESTART_PAUSE_S", 0.01)
    ray = installed(monkeypatch)
    StubRouter.may_start.clear()
    group = RouterGroup(config(LIMIT), b"", {}, [].append)
    starting = asyncio.create_task(group.start())
    for _ in range(2):
        await until(lambda: len(ray.actors(StubRouter)) == 1)
        ray.actors(StubRouter)[0].die(router_group.RayActorError())
    StubRouter.may_start.set()
    assert await starting == "http://127.0.0.1:1"
    assert limits(ray) == [3, 3, 4]
    await group.stop()


async def test_a_router_that_hangs_in_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_group, "_RESTART_PAUSE_S", 0.01)
    ray, reports = installed(monkeypatch), list[str]()
    StubRouter.may_start.clear()
    monkeypatch.setattr(config_module, "_LEAST_ATTEMPT_S", 0.0)
    short = config(LIMIT).to_dict() | {"ray": {"start_timeout_s": 0.5}}
    with pytest.raises(WorkerLostError, match=r"The router did not start within 0\.1 s"):
        await RouterGroup(BatonConfig.from_dict(short), b"", {}, reports.append).start()
    assert set(reports) == {"router-0 could not be started; trying again: The router did not start within 0.1 s."}
    assert ray.instances(StubRouter) == []


async def test_a_router_that_always_dies_in_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(router: StubRouter) -> None:
        raise ProcessExit

    monkeypatch.setattr(router_group, "_RESTART_PAUSE_S", 0.01)
    installed(monkeypatch)
    monkeypatch.setattr(StubRouter, "start", die)
    with pytest.raises(WorkerLostError, match=r"The router cannot start: its process died"):
        await RouterGroup(config(LIMIT), b"", {}, [].append).start()


async def test_a_router_that_hangs_is_named_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    async with running(monkeypatch, reports) as (ray, group):
        hanging = ray.instances(StubRouter)[1]
        hanging.hangs = True
        await until(lambda: group.num_restarts == 1 and len(ray.instances(StubRouter)) == 3)
        assert hanging not in ray.instances(StubRouter)
        assert limits(ray) == [3, 3, 4]
    [suspicion, loss] = reports[:2]
    assert suspicion.startswith("router-1 may hang: it has not answered for 0.")
    assert suspicion.endswith("it is replaced if it stays silent for 0.2 s more")
    assert loss.startswith("router-1 is lost (it has not answered for")


async def test_a_router_that_answers_again_in_time_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    longer = config(LIMIT).to_dict() | {"liveness": {"suspect_after": 0.1, "replace_after": 60.0}}
    monkeypatch.setattr(f"{__name__}.config", lambda _: BatonConfig.from_dict(longer))
    async with running(monkeypatch, reports) as (ray, group):
        before = ray.instances(StubRouter)
        before[1].hangs = True
        await until(lambda: any("may hang" in text for text in reports))
        before[1].hangs = False
        await until(lambda: reports[-1] == "router-1 answers again")
        assert ray.instances(StubRouter) == before
        assert group.num_restarts == 0


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("limit", [16, 17, 31, 100])
def test_shares_add_up_to_the_limit(count: int, limit: int) -> None:
    shares = [Share(index, count).of(limit) or 0 for index in range(count)]
    assert sum(shares) == limit
    assert max(shares) - min(shares) <= 1
