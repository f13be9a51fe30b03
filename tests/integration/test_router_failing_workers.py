"""Workers that answer and fail: the router tells a worker at fault from a request at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.core.errors import BatonError, InternalError, TransferError, WorkerLostError
from tests.fake_workers import FakeCluster, FakeWorker, decode_some, expected_tokens, failing, handoff_failed
from tests.waiting import until

NUM_REQUESTS = 300
REQUESTS_PER_S = 100
NUM_WAVES, WAVE = 15, 10


@pytest.fixture
async def cluster():
    async with FakeCluster() as fake:
        yield fake


@pytest.mark.parametrize("bad", ["p1", "d1"])
async def test_another_worker_takes_over_after_an_internal_error(cluster, bad):
    await cluster.add_all(["p1", "p2", "d1", "d2"])
    cluster.workers[bad].scripts = [failing(InternalError("ours"))]
    assert await cluster.run() == expected_tokens(6)
    assert cluster.metric("baton_retries_total", reason="internal_error") == 1
    assert cluster.registry.get(bad).failures_in_a_row == 1
    await until(lambda: cluster.is_idle)


async def test_without_another_worker_the_client_gets_the_error(cluster):
    _, decode = await cluster.add_all(["p1", "d1"])
    decode.scripts = [failing(InternalError("ours"))]
    with pytest.raises(InternalError, match="ours"):
        await cluster.run()
    assert len(decode.requests) == 1
    assert await cluster.run() == expected_tokens(6)


async def test_a_request_that_always_fails_tries_two_workers_and_suspects_none(cluster):
    workers = await cluster.add_all(["p1", "d1", "d2", "d3"])
    for _ in range(4):
        for worker in workers[1:]:
            worker.scripts = [failing(InternalError("ours"))]
        before = sum(len(worker.requests) for worker in workers[1:])
        with pytest.raises(InternalError, match="ours"):
            await cluster.run()
        assert sum(len(worker.requests) for worker in workers[1:]) - before == 2
    assert all(worker.is_accepting and worker.failures_in_a_row == 0 for worker in cluster.registry.workers)


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
async def test_a_request_that_always_fails_after_some_tokens_suspects_no_worker(cluster, num_tokens):
    workers = await cluster.add_all(["p1", "d1", "d2", "d3"])
    for _ in range(4):
        for worker in workers[1:]:
            worker.scripts = [decode_some(num_tokens, InternalError("ours"))]
        with pytest.raises(InternalError, match="ours"):
            await cluster.run(cluster.request("bad", max_tokens=40))
    assert all(worker.is_accepting and worker.failures_in_a_row == 0 for worker in cluster.registry.workers)


async def test_a_worker_that_accepts_no_kv_does_not_attract_traffic(cluster):
    await cluster.add_all(["p1", "p2", "d1", "d2"])
    broken = cluster.workers["d1"]

    async def prefill(worker, request):
        yield await worker.first_token(request)
        is_broken = request.handoff.peer == broken.address
        yield handoff_failed(InternalError("ours")) if is_broken else worker.handoff_done()

    async def waits_for_its_kv(worker, request):
        await asyncio.sleep(0.05)
        raise TransferError("the transfer failed")
        yield

    for worker in cluster.workers.values():
        worker.pause_s = 0.005
    broken.scripts = AlwaysFails(waits_for_its_kv)
    for name in ("p1", "p2"):
        cluster.workers[name].scripts = AlwaysFails(prefill)
    for wave in range(NUM_WAVES):
        results = await asyncio.gather(*(run_late(cluster, f"r{wave}-{index}") for index in range(WAVE)))
        assert results == [expected_tokens(6)] * WAVE
    assert len(broken.requests) < NUM_WAVES * WAVE / 3
    assert all(cluster.registry.get(name).is_accepting for name in ("p1", "p2", "d2"))


FAULTS = pytest.mark.parametrize(
    ("bad", "error"), [("p1", InternalError("ours")), ("d1", InternalError("ours")), ("d1", WorkerLostError("broke"))]
)


async def run_late(cluster: FakeCluster, name: str, delay_s: float = 0.0) -> list[int] | BatonError:
    """The tokens of a request that arrives so much later, or its error."""
    await asyncio.sleep(delay_s)
    try:
        return await cluster.run(cluster.request(name))
    except BatonError as failure:
        return failure


async def with_one_that_always_fails(cluster: FakeCluster, bad: str, error: BatonError) -> FakeWorker:
    await cluster.add_all(["p1", "p2", "d1", "d2"])
    for worker in cluster.workers.values():
        worker.pause_s = 0.005
    cluster.workers[bad].scripts = AlwaysFails(failing(error))
    return cluster.workers[bad]


@FAULTS
async def test_a_failing_worker_costs_no_request_at_100_requests_per_second(cluster, bad, error):
    await with_one_that_always_fails(cluster, bad, error)
    arrivals = (run_late(cluster, f"r{index}", index / REQUESTS_PER_S) for index in range(NUM_REQUESTS))
    results = await asyncio.gather(*arrivals)
    assert [result for result in results if result != expected_tokens(6)] == []
    await until(lambda: cluster.is_idle)


@FAULTS
async def test_a_worker_that_fails_at_once_does_not_attract_traffic(cluster, bad, error):
    broken = await with_one_that_always_fails(cluster, bad, error)
    for wave in range(NUM_WAVES):
        await asyncio.gather(*(run_late(cluster, f"r{wave}-{index}") for index in range(WAVE)))
    # One wave until it is left alone, and one after each pause; pauses grow, so they are few on any machine.
    assert len(broken.requests) < NUM_WAVES * WAVE / 3


async def test_a_recovered_worker_gets_requests_again(cluster):
    await cluster.add_all(["p1", "d1", "d2"])
    broken = cluster.workers["d1"]
    broken.scripts = [failing(InternalError("ours"))] * 3
    known = cluster.registry.get("d1")
    while broken.scripts:
        assert await cluster.run() == expected_tokens(6)
    assert not known.is_accepting
    known.paused_until_s = 0.0
    await asyncio.gather(*(cluster.run(cluster.request(f"r{index}")) for index in range(4)))
    assert known.failures_in_a_row == 0
    assert known.is_accepting


class AlwaysFails(list):
    """Scripts of a :class:`FakeWorker` that never run out."""

    def __init__(self, script: Callable[[FakeWorker, object], object]) -> None:
        super().__init__([script])

    def pop(self, index: int = -1) -> Callable[[FakeWorker, object], object]:
        return self[0]
