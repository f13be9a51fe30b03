"""The router's table of workers."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.roles import DECODE, PREFILL
from cluster.registry.progress_judge import Standing
from cluster.registry.workers import WorkerInfo, WorkerRegistry
from tests.credentials import connect
from tests.waiting import TIMEOUT_S
from tests.worker_infos import make_info


@pytest.fixture
async def registry():
    registry = WorkerRegistry(connect)
    yield registry
    for worker in registry.workers:
        await registry.remove(worker.info.worker_id)


async def test_workers_are_found_by_pool_and_id(registry):
    first, second = registry.add(make_info("p1", PREFILL)), registry.add(make_info("d1", DECODE))
    assert registry.pool(PREFILL) == [first]
    assert registry.get("d1") is second
    assert registry.get("d2") is None
    assert registry.workers == [first, second]


async def test_adding_a_worker_twice_keeps_its_requests(registry):
    worker = registry.add(make_info("p1", PREFILL))
    worker.begin()
    assert registry.add(make_info("p1", PREFILL)) is worker
    assert worker.in_flight == 1


async def test_every_change_wakes_waiting_tasks(registry):
    for change in (
        lambda: registry.add(make_info("p1", PREFILL)),
        lambda: registry.drain("p1"),
        lambda: asyncio.ensure_future(registry.remove("p1")),
    ):
        changed = registry.changed
        assert not changed.is_set()
        change()
        await asyncio.wait_for(changed.wait(), TIMEOUT_S)


async def test_a_draining_worker_accepts_nothing(registry):
    worker = registry.add(make_info("p1", PREFILL))
    assert registry.has_accepting(PREFILL)
    assert registry.drain("p1") is worker
    assert not registry.has_accepting(PREFILL)
    assert not worker.is_accepting


async def test_a_suspect_accepts_nothing_until_it_is_trusted_again(registry):
    worker = registry.add(make_info("p1", PREFILL))
    for standing in (Standing.SUSPECTED, Standing.LOST):
        registry.judged("p1", standing, "it has not answered for 3 s")
        assert not worker.is_accepting
        worker.failed()  # a request that was sent before
    registry.judged("p1", Standing.TRUSTED, "")
    assert worker.is_accepting
    assert worker.failures_in_a_row == 0
    assert registry.num_suspicions == {PREFILL: 1, DECODE: 0}
    registry.judged("nobody", Standing.SUSPECTED, "it left meanwhile")


async def test_suspects_are_cut_off_once_another_worker_of_the_pool_accepts_requests(registry):
    first, other = registry.add(make_info("d1", DECODE)), registry.add(make_info("p1", PREFILL))
    registry.judged("d1", Standing.SUSPECTED, "it has not answered for 3 s")
    assert not first.client.is_suspended
    second = registry.add(make_info("d2", DECODE))
    assert first.client.is_suspended
    registry.judged("d2", Standing.SUSPECTED, "it has not answered for 3 s")
    assert not second.client.is_suspended
    registry.judged("d1", Standing.TRUSTED, "")
    assert [worker.client.is_suspended for worker in (first, second, other)] == [False, True, False]


async def test_repeated_failures_lengthen_the_pause():
    now_s = 0.0
    registry = WorkerRegistry(connect, clock=lambda: now_s)
    worker = registry.add(make_info("p1", PREFILL))
    pauses = []
    for _ in range(8):
        worker.failed()
        pauses.append(max(0.0, worker.paused_until_s - now_s))
        now_s = max(now_s, worker.paused_until_s)
        assert worker.is_accepting
    assert pauses == [0, 0, 2, 4, 8, 16, 16, 16]
    worker.succeeded()
    worker.failed()
    assert worker.is_accepting
    await registry.remove("p1")


async def test_untried_workers_are_accepting_workers_that_were_not_named(registry):
    for worker_id in ("p1", "p2", "p3"):
        registry.add(make_info(worker_id, PREFILL))
    registry.drain("p3")
    assert registry.has_untried(PREFILL, {"p1"})
    assert not registry.has_untried(PREFILL, {"p1", "p2"})
    assert not registry.has_untried(DECODE, ())


async def test_a_worker_is_idle_after_its_last_request(registry):
    worker = registry.add(make_info("p1", PREFILL))
    assert worker.idle.is_set()
    worker.begin()
    worker.begin()
    assert (worker.in_flight, worker.idle.is_set()) == (2, False)
    worker.end()
    assert not worker.idle.is_set()
    worker.end()
    assert worker.idle.is_set()
    assert worker.assigned == 2


async def test_draining_or_removing_an_unknown_worker_does_nothing(registry):
    assert registry.drain("nobody") is None
    await registry.remove("nobody")


def test_worker_info_round_trips_between_processes():
    info = make_info("p1", PREFILL, eos_token_ids=(1, 2))
    assert WorkerInfo.from_dict(info.to_dict()) == info
