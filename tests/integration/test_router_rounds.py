"""Rounds through the router: their tokens are the answer's, whatever workers do, over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from baton.core.errors import InternalError
from baton.core.rounds import Round
from baton.rpc.rounds import pack_round
from baton.rpc.wire import worker_pb2
from cluster.requests.generation import GenerationRequest, TokenChunk
from cluster.routing.routing_config import RoutingConfig
from tests.fake_workers import (
    DecodeScript,
    FakeCluster,
    FakeWorker,
    PrefillScript,
    death,
    decode_some,
    expected_tokens,
    good_decode,
    good_prefill,
)
from tests.waiting import until

Change = Callable[[worker_pb2.TokenBatch], object]


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as fake:
        yield fake


def traced(cluster: FakeCluster) -> GenerationRequest:
    return replace(cluster.request(), is_traced=True)


def add_round(batch: worker_pb2.TokenBatch) -> None:
    """A draft of one token, which was rejected."""
    wrong = batch.token_ids[0] + 1
    batch.num_drafted, batch.drafted_by = 1, "suffix"
    batch.round.CopyFrom(pack_round(Round(tuple(batch.token_ids), "suffix", (wrong,), (-1,))))


def telling_prefill(then: PrefillScript = good_prefill) -> PrefillScript:
    async def script(worker: FakeWorker, request: worker_pb2.PrefillRequest) -> AsyncIterator[worker_pb2.PrefillEvent]:
        assert request.sequence.is_traced
        async for event in then(worker, request):
            if event.HasField("first_token"):
                event.first_token.round.CopyFrom(pack_round(Round(tuple(event.first_token.token_ids))))
            yield event

    return script


def telling(then: DecodeScript = good_decode, change: Change = lambda batch: None) -> DecodeScript:
    """A decode worker that sends rounds, changed."""

    async def script(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[worker_pb2.TokenBatch]:
        assert request.sequence.is_traced
        async for batch in then(worker, request):
            add_round(batch)
            change(batch)
            yield batch

    return script


def check(chunks: list[TokenChunk]) -> list[Round]:
    rounds = [chunk.round for chunk in chunks if chunk.round is not None]
    assert [token for found in rounds for token in found.token_ids] == expected_tokens(6)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens(6)
    return rounds


async def test_the_prefill_worker_sends_the_first_round(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_all(["p1", "d1"])
    prefill.scripts, decode.scripts = [telling_prefill()], [telling()]
    first, *rest = check(await cluster.chunks(traced(cluster)))
    assert first.draft == ()
    assert {found.method for found in rest} == {"suffix"}


async def test_a_decode_worker_that_computes_the_prompt_sends_all() -> None:
    async with FakeCluster(routing=RoutingConfig(local_prefill="always")) as cluster:
        [decode] = await cluster.add_all(["d1"])
        decode.scripts = [telling()]
        check(await cluster.chunks(traced(cluster)))


async def test_rounds_go_on_on_another_worker(cluster: FakeCluster) -> None:
    prefill, bad, good = await cluster.add_all(["p1", "d1", "d2"])
    prefill.scripts = [telling_prefill()]
    bad.scripts, good.scripts = [telling(decode_some(2, death))], [telling()]
    check(await cluster.chunks(traced(cluster)))
    assert good.requests


async def test_a_damaged_round_is_not_passed_on(cluster: FakeCluster) -> None:
    prefill, bad, good = await cluster.add_all(["p1", "d1", "d2"])
    prefill.scripts = [telling_prefill()]
    bad.scripts, good.scripts = [telling(change=lambda batch: batch.round.accepted.append(3))], [telling()]
    check(await cluster.chunks(traced(cluster)))
    assert (len(bad.requests), len(good.requests)) == (1, 1)
    await until(lambda: cluster.is_idle)


async def test_missing_rounds_are_an_error(cluster: FakeCluster) -> None:
    await cluster.add_all(["p1", "d1"])
    with pytest.raises(InternalError, match="without their round"):
        await cluster.run(traced(cluster))


async def test_untraced_requests_ask_for_nothing_and_drop_what_comes(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_all(["p1", "d1"])

    async def script(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[worker_pb2.TokenBatch]:
        async for batch in good_decode(worker, request):
            batch.round.accepted.append(7)
            yield batch

    decode.scripts = [script]
    chunks = await cluster.chunks()
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens(6)
    assert {chunk.round for chunk in chunks} == {None}
    assert not any(worker.requests[0].sequence.is_traced for worker in (prefill, decode))
