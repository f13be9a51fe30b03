"""Streams of workers that are suspected: they continue elsewhere, if there is an elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from baton.core.errors import TransferError
from cluster.registry.progress_judge import Standing
from tests.fake_workers import (
    FakeCluster,
    death,
    decode_some,
    endless,
    engine_end,
    expected_tokens,
    failing,
    hang,
    prefill_then,
)
from tests.waiting import TIMEOUT_S, until

SILENCE = "it has not answered for 3.0 s"


@pytest.fixture
async def cluster():
    async with FakeCluster() as fake:
        yield fake


def suspect(cluster: FakeCluster, worker_id: str) -> None:
    cluster.registry.judged(worker_id, Standing.SUSPECTED, SILENCE)


async def test_a_stream_moves_from_a_suspected_decode_worker(cluster):
    _, frozen, good = await cluster.add_all(["p1", "d1", "d2"])
    frozen.scripts = [decode_some(2, endless)]
    frozen.answers.clear()
    request = cluster.request()
    async with asyncio.timeout(TIMEOUT_S), aclosing(cluster.stream(request)) as chunks:
        got = [(await anext(chunks)).token_ids[0] for _ in range(3)]
        suspect(cluster, "d1")
        got += [token async for chunk in chunks for token in chunk.token_ids]
    assert got == expected_tokens(6)
    assert list(good.requests[0].sequence.output_token_ids) == expected_tokens(3)
    assert len(request.timeline.failed_attempts) == 1
    assert cluster.metric("baton_retries_total", reason="worker_lost") == 1
    assert cluster.registry.get("d1").failures_in_a_row == 0
    await until(lambda: cluster.is_idle)
    assert await cluster.run(cluster.request("next")) == expected_tokens(6)
    assert len(frozen.requests) == 1


async def test_a_prompt_moves_from_a_suspected_prefill_worker(cluster):
    frozen, good, _ = await cluster.add_all(["p1", "p2", "d1"])
    frozen.scripts = [hang]
    running = asyncio.create_task(cluster.run())
    await until(lambda: frozen.num_open == 1)
    suspect(cluster, "p1")
    assert await running == expected_tokens(6)
    assert len(good.requests) == 1


async def test_an_open_handoff_of_a_suspected_prefill_worker_is_recomputed_on_the_same_decode_worker(cluster):
    frozen, _, decode = await cluster.add_all(["p1", "p2", "d1"])
    frozen.scripts = [prefill_then(endless)]
    decode.scripts = [hang]
    running = asyncio.create_task(cluster.run())
    await until(lambda: decode.num_open == 1)
    suspect(cluster, "p1")
    assert await running == expected_tokens(6)
    assert decode.requests[1].transfer_id == ""
    assert cluster.registry.get("d1").failures_in_a_row == 0


async def test_a_stream_stays_with_the_only_worker_until_it_recovers(cluster):
    _, frozen = await cluster.add_all(["p1", "d1"])
    continues = asyncio.Event()
    frozen.scripts = [decode_some(2, lambda _: continues.wait())]
    async with asyncio.timeout(TIMEOUT_S), aclosing(cluster.stream()) as chunks:
        got = [(await anext(chunks)).token_ids[0] for _ in range(3)]
        suspect(cluster, "d1")
        rest = asyncio.create_task(anext(chunks))
        await asyncio.sleep(0.05)
        assert frozen.num_open == 1
        assert not rest.done()
        cluster.registry.judged("d1", Standing.TRUSTED, "")
        continues.set()
        got += (await rest).token_ids
        got += [token async for chunk in chunks for token in chunk.token_ids]
    assert got == expected_tokens(6)


@pytest.mark.parametrize("by", ["another_worker", "its_replacement"])
async def test_a_stream_that_stayed_moves_to_a_new_worker(cluster, by):
    _, frozen = await cluster.add_all(["p1", "d1"])
    frozen.scripts = [decode_some(2, endless)]
    async with asyncio.timeout(TIMEOUT_S), aclosing(cluster.stream()) as chunks:
        got = [(await anext(chunks)).token_ids[0] for _ in range(3)]
        suspect(cluster, "d1")
        rest = asyncio.create_task(anext(chunks))
        if by == "its_replacement":
            await cluster.registry.remove("d1")
        new = await cluster.add("d2")
        got += (await rest).token_ids
        got += [token async for chunk in chunks for token in chunk.token_ids]
    assert got == expected_tokens(6)
    assert list(new.requests[0].sequence.output_token_ids) == expected_tokens(3)


async def test_requests_wait_while_all_workers_of_a_pool_are_suspected(cluster):
    await cluster.add_all(["p1", "d1"])
    suspect(cluster, "p1")
    assert not cluster.router.is_ready()
    running = asyncio.create_task(cluster.run())
    await asyncio.sleep(0.05)
    assert cluster.workers["p1"].requests == []
    cluster.registry.judged("p1", Standing.TRUSTED, "")
    assert await running == expected_tokens(6)


async def test_a_worker_whose_connections_break_is_suspected_before_the_next_attempt(cluster):
    _, dead, good = await cluster.add_all(["p1", "d1", "d2"])
    dead.scripts = [decode_some(1, death)]
    assert await cluster.run() == expected_tokens(6)
    assert cluster.registry.get("d1").suspicion
    assert len(good.requests) == 1


async def test_a_stream_of_the_only_worker_waits_for_its_replacement_when_the_engine_ends(cluster):
    """The process answers until it is replaced; attempts on it would be used up at once."""
    _, ended = await cluster.add_all(["p1", "d1"])
    ended.scripts = [decode_some(2, engine_end)]
    running = asyncio.create_task(cluster.run())
    await until(lambda: cluster.registry.get("d1").suspicion or running.done())
    new = await cluster.add("d2")
    assert await running == expected_tokens(6)
    assert len(ended.requests) == 1
    assert list(new.requests[0].sequence.output_token_ids) == expected_tokens(3)


async def test_a_worker_that_fails_and_answers_is_not_suspected(cluster):
    _, failed, _ = await cluster.add_all(["p1", "d1", "d2"])
    failed.scripts = [failing(TransferError("no"))]
    assert await cluster.run() == expected_tokens(6)
    assert [worker.suspicion for worker in cluster.registry.workers] == ["", "", ""]
