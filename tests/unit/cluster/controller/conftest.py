"""Listeners of pools, and the Ray that pools run on: one within this process, or a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.controller import worker_pool
from tests.fake_hosts import small_ray
from tests.fake_ray import FakeRay, RealRay
from tests.pool_listener import Listener

NUM_CPUS = 8


@pytest.fixture(scope="module")
def real_ray() -> Iterator[RealRay]:
    with small_ray(num_cpus=NUM_CPUS):
        yield RealRay()


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.thorough(covered_by="[simulated]"))])
def a_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeRay | RealRay:
    """``make test`` runs most tests on a simulated Ray alone; those marked ``on_both`` run on a real one, too."""
    monkeypatch.setattr(worker_pool, "_MAX_BACKOFF_S", 0.05)
    if request.param == "real":
        found: RealRay = request.getfixturevalue("real_ray")
        return found
    fake = FakeRay(NUM_CPUS)
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def listener() -> Listener:
    return Listener()
