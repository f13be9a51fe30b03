"""Listeners of pools, and the Ray that pools run on: one within this process, or a real one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from cluster.config.config import BatonConfig
from cluster.controller import worker_pool
from cluster.controller.worker_pool import WorkerPool
from tests.credentials import SECRET
from tests.fake_hosts import FakeHost, small_ray
from tests.fake_ray import FakeRay, RealRay
from tests.pool_listener import Listener

NUM_CPUS = 8


@pytest.fixture(scope="module")
def real_ray() -> Iterator[RealRay]:
    with small_ray(num_cpus=NUM_CPUS):
        yield RealRay()


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.thorough(covered_by="[simulated]"))])
async def a_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeRay | RealRay]:
    """``make test`` runs most tests on a simulated Ray alone; those marked ``on_both`` run on a real one, too."""
    monkeypatch.setattr(worker_pool, "_MAX_BACKOFF_S", 0.05)
    if request.param == "real":
        yield request.getfixturevalue("real_ray")
        return
    fake = FakeRay(NUM_CPUS)
    fake.install(monkeypatch)
    yield fake
    await fake.close()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def make_pool(listener: Listener, a_ray: FakeRay | RealRay) -> AsyncIterator[Callable[..., WorkerPool]]:
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
