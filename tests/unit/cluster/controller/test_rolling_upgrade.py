"""Rolling upgrades: the order of replacements, the sizes of the pools meanwhile, and the way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from baton.core.errors import ConfigError, InvalidRequestError, LayoutMismatchError
from baton.core.roles import POOLS
from cluster.config.config import BatonConfig
from cluster.controller import worker_pool
from cluster.controller.pool_member import ChangeOrigin, PoolMember
from cluster.controller.rolling_upgrade import RollingUpgrade, UpgradeError
from cluster.controller.settling import settle
from cluster.controller.survivors import worker_number
from cluster.controller.worker_agreement import WorkerAgreement
from cluster.controller.worker_pool import WorkerPool
from cluster.registry.workers import WorkerInfo
from tests.credentials import SECRET
from tests.fake_hosts import FakeHost
from tests.fake_ray import FakeRay
from tests.pool_listener import READY_S, Listener, ids_in
from tests.waiting import until
from tests.worker_infos import make_info

NUM_CPUS = 16
OLD: dict[str, Any] = {"max_model_len": 100}
NEW: dict[str, Any] = {"max_model_len": 200}
BROKEN: dict[str, Any] = {"max_model_len": 13}


async def nothing_more() -> None:
    """Ends an upgrade."""


class LayoutHost(FakeHost):
    """Has another KV layout for each length, and cannot start with one of them."""

    may_start: asyncio.Event | None = None

    async def start(self) -> dict[str, Any]:
        if self.may_start is not None:
            await self.may_start.wait()
        length = self.config.max_model_len
        if length == BROKEN["max_model_len"]:
            raise ConfigError("max_model_len is 13, which is too little.\nRaise it.")
        return await super().start() | {"kv_fingerprint": str(length), "max_model_len": length}


class AgreeingListener(Listener):
    """Also notes how many workers of each pool are ready or draining, whenever one comes or leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.agreement = WorkerAgreement()
        self.sizes: dict[str, list[int]] = {pool: [] for pool in POOLS}
        self.lengths: dict[str, list[set[int]]] = {pool: [] for pool in POOLS}
        self.draining: set[str] = set()
        self.may_drain.set()

    async def worker_ready(self, info: WorkerInfo, *, is_outdated: bool = False) -> None:
        self.agreement.check(info)
        await super().worker_ready(info)
        self._note()

    async def drain(self, worker_id: str, timeout_s: float) -> None:
        self.draining.add(worker_id)
        self._note()
        await super().drain(worker_id, timeout_s)

    def _note(self) -> None:
        for pool in POOLS:
            serving = [
                info for info in self.ready.values() if info.pool == pool and info.worker_id not in self.draining
            ]
            self.sizes[pool].append(len(serving))
            self.lengths[pool].append({info.max_model_len for info in serving})


class World:
    """Two pools with an upgrade."""

    def __init__(self, fake: FakeRay) -> None:
        self.ray = fake
        self.listener = AgreeingListener()
        self.pools: dict[str, WorkerPool] = {}

    async def start(self, config: dict[str, Any] = OLD, **sizes: int) -> RollingUpgrade:
        self.config = BatonConfig.from_dict(config)
        for name in POOLS:
            pool = WorkerPool(name, self.config, self.listener, LayoutHost, "127.0.0.1", SECRET)
            pool.scale(sizes.get(name, 1))
            self.pools[name] = pool
        await asyncio.gather(*(pool.wait_until_ready(READY_S) for pool in self.pools.values()))
        for pool in POOLS:
            self.listener.sizes[pool].clear()
            self.listener.lengths[pool].clear()
        return RollingUpgrade(self.pools, self.listener.agreement, SECRET, self.listener.report)

    def ready(self, pool: str) -> list[str]:
        return ids_in(self.pools[pool], "ready")

    def lengths(self) -> set[int]:
        return {info.max_model_len for info in self.listener.ready.values()}


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(worker_pool, "_MAX_BACKOFF_S", 0.01)
    fake = FakeRay(NUM_CPUS)
    fake.install(monkeypatch)
    found = World(fake)
    yield found
    await asyncio.gather(*(pool.stop() for pool in found.pools.values()))


async def test_every_worker_is_replaced_and_pools_keep_their_size(world: World) -> None:
    upgrade = await world.start(prefill=1, decode=3)
    await upgrade.run(world.config, BatonConfig.from_dict(NEW), nothing_more)
    assert world.lengths() == {200}
    assert (world.ready("prefill"), world.ready("decode")) == (["prefill-2"], ["decode-4", "decode-5", "decode-6"])
    assert min(world.listener.sizes["prefill"]) >= 1
    assert (min(world.listener.sizes["decode"]), max(world.listener.sizes["decode"])) == (3, 4)
    # There are always a prefill and a decode worker of one kind, which can hand KV over.
    for prefill, decode in zip(world.listener.lengths["prefill"], world.listener.lengths["decode"], strict=True):
        assert prefill & decode
    assert world.listener.drained == ["decode-3", "decode-2", "prefill-1", "decode-1"]
    assert not any(pool.outdated for pool in world.pools.values())


async def test_a_pool_without_changes_is_not_touched(world: World) -> None:
    upgrade = await world.start(prefill=2, decode=2)
    await upgrade.run(world.config, BatonConfig.from_dict({**OLD, "decode": {"chunk_tokens": 64}}), nothing_more)
    assert (world.ready("prefill"), world.ready("decode")) == (["prefill-1", "prefill-2"], ["decode-3", "decode-4"])
    # Their processes have the old settings of decode workers.
    with pytest.raises(InvalidRequestError, match="before the last upgrade"):
        world.pools["decode"].change_role_from(world.pools["prefill"], ChangeOrigin.OPERATOR)
    world.pools["prefill"].change_role_from(world.pools["decode"], ChangeOrigin.OPERATOR)
    await world.pools["prefill"].wait_until_ready(READY_S)
    assert world.ready("prefill") == ["prefill-1", "prefill-2", "prefill-3"]


async def test_workers_that_do_not_start_bring_the_old_settings_back(world: World) -> None:
    upgrade = await world.start(decode=2)
    before = (world.ready("prefill"), world.ready("decode"))
    with pytest.raises(UpgradeError, match=r"(?s)too little.*Raise it.*All workers run with the old settings again"):
        await upgrade.run(world.config, BatonConfig.from_dict({**NEW, **BROKEN}), nothing_more)
    assert (world.ready("prefill"), world.ready("decode")) == before
    assert world.lengths() == {100}
    await upgrade.run(world.config, BatonConfig.from_dict(NEW), nothing_more)
    assert world.lengths() == {200}


class UnluckyHost(LayoutHost):
    """Does not start with the numbers of a test."""

    numbers: tuple[int, ...] = ()

    async def start(self) -> dict[str, Any]:
        if worker_number(self.worker_id) in self.numbers:
            raise ConfigError(f"no luck with {self.worker_id}")
        return await super().start()


async def test_a_start_that_fails_once_is_repeated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade = await world.start(decode=2)
    monkeypatch.setattr(UnluckyHost, "numbers", (3, 5))
    world.pools["decode"]._actor_class = UnluckyHost
    await upgrade.run(world.config, BatonConfig.from_dict(NEW), nothing_more)
    assert world.lengths() == {200}
    assert world.ready("decode") == ["decode-4", "decode-6"]
    assert min(world.listener.sizes["decode"]) >= 2


async def test_workers_that_were_replaced_are_rolled_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade = await world.start(decode=2)
    monkeypatch.setattr(UnluckyHost, "numbers", (4, 5))
    world.pools["decode"]._actor_class = UnluckyHost
    with pytest.raises(UpgradeError, match=r"(?s)2 starts of .*no luck with decode-4.*no luck with decode-5"):
        await upgrade.run(world.config, BatonConfig.from_dict(NEW), nothing_more)
    assert world.lengths() == {100}
    assert (len(world.ready("prefill")), len(world.ready("decode"))) == (1, 2)
    assert min(world.listener.sizes["decode"]) >= 2


async def test_what_cannot_be_rolled_back_is_named(world: World) -> None:
    upgrade = await world.start(decode=2)

    class SecondHostBreaks(LayoutHost):
        async def start(self) -> dict[str, Any]:
            if worker_number(self.worker_id) >= 4:
                raise ConfigError("the disk is gone")
            return await super().start()

    world.pools["decode"]._actor_class = SecondHostBreaks
    with pytest.raises(UpgradeError, match=r"(?s)could not be restored everywhere.*new ones: decode-3\."):
        await upgrade.run(world.config, BatonConfig.from_dict(NEW), nothing_more)
    assert len(world.ready("decode")) == 2


async def test_routers_that_refuse_the_configuration_bring_the_old_settings_back(world: World) -> None:
    upgrade = await world.start()

    async def refuse() -> None:
        raise ConfigError("the certificate is gone")

    with pytest.raises(UpgradeError, match=r"(?s)certificate is gone.*with the old settings again"):
        await upgrade.run(world.config, BatonConfig.from_dict(NEW), refuse)
    assert world.lengths() == {100}


async def test_a_worker_that_waits_for_a_place_ends_the_upgrade(world: World) -> None:
    upgrade = await world.start()
    new = {**NEW, "decode": {"resources": {"cpus": NUM_CPUS}}, "ray": {"start_timeout_s": 0.2}}
    with pytest.raises(UpgradeError, match=r"1 of 2 decode workers are ready"):
        await upgrade.run(world.config, BatonConfig.from_dict(new), nothing_more)
    assert (world.ready("prefill"), world.ready("decode")) == (["prefill-1"], ["decode-1"])


async def test_a_worker_that_dies_meanwhile_is_replaced_with_the_new_settings(world: World) -> None:
    upgrade = await world.start(decode=2)
    world.listener.may_drain.clear()
    running = asyncio.create_task(upgrade.run(world.config, BatonConfig.from_dict(NEW), nothing_more))
    await until(lambda: bool(world.listener.draining))
    victim = next(info for info in world.listener.ready.values() if info.worker_id == "decode-2")
    world.ray.kill_process(victim.pid)
    world.listener.may_drain.set()
    await running
    assert world.lengths() == {200}
    assert (len(world.ready("prefill")), len(world.ready("decode"))) == (1, 2)


async def test_the_end_waits_for_workers_that_replace_lost_ones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new worker dies when no worker has the old settings any more."""
    upgrade = await world.start(decode=2)
    await upgrade.run(world.config, BatonConfig.from_dict(NEW), nothing_more)
    monkeypatch.setattr(LayoutHost, "may_start", asyncio.Event())
    world.ray.kill_process(next(iter(world.listener.ready.values())).pid)
    await until(lambda: sum(len(world.ready(pool)) for pool in POOLS) == 2)
    [line] = await settle(world.pools, 0.05)
    assert line.endswith(" is starting")
    settling = asyncio.create_task(settle(world.pools, READY_S))
    assert not (await asyncio.wait({settling}, timeout=0.05))[0]
    LayoutHost.may_start.set()
    assert await settling == []
    assert (len(world.ready("prefill")), len(world.ready("decode"))) == (1, 2)


async def test_a_dead_worker_whose_death_is_not_noticed_yet_is_not_ready(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed, ended = asyncio.Event(), PoolMember.ended

    async def ended_late(member: PoolMember) -> None:
        try:
            await ended(member)
        finally:
            await noticed.wait()

    monkeypatch.setattr(PoolMember, "ended", ended_late)
    await world.start(decode=2)
    victim = next(info for info in world.listener.ready.values() if info.pool == "decode")
    world.ray.kill_process(victim.pid)
    assert len(world.ready("decode")) == 2
    assert await settle(world.pools, 0.05) == [f"{victim.worker_id} does not answer"]
    settling = asyncio.create_task(settle(world.pools, READY_S))
    assert not (await asyncio.wait({settling}, timeout=0.05))[0]
    noticed.set()
    assert await settling == []
    assert victim.worker_id not in {info.worker_id for info in world.listener.ready.values()}


async def test_workers_that_cannot_start_end_the_wait(world: World) -> None:
    await world.start(decode=2)

    class Unable(LayoutHost):
        async def start(self) -> dict[str, Any]:
            raise ConfigError("the disk is gone")

    world.pools["decode"]._actor_class = Unable
    world.ray.kill_process(next(info.pid for info in world.listener.ready.values() if info.pool == "decode"))
    await until(lambda: len(world.ready("decode")) == 1)
    [line] = await settle(world.pools, READY_S)
    assert line.startswith("decode-")


def agreed(**changes: Any) -> Callable[[], None]:
    agreement = WorkerAgreement()
    agreement.check(make_info("prefill-1", "prefill"))
    return lambda: agreement.check(make_info("decode-1", "decode", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_fingerprint": "other"}, "different KV layout"),
        ({"vocab_size": 5}, r"serves fake \(5 tokens"),
        ({"model_name": "x"}, "serves x"),
    ],
)
def test_workers_must_agree(changes: dict[str, Any], message: str) -> None:
    agreed()()
    with pytest.raises(LayoutMismatchError, match=message):
        agreed(**changes)()
