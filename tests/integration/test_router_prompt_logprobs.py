"""Log probabilities of prompts through the router: once per request, whatever workers do, over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest

from baton.core.errors import InternalError, WorkerLostError
from baton.core.prompt_logprobs import PromptLogprobs
from baton.rpc.prompt_logprobs import pack_prompt_logprobs
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

NUM_TOP = 2
PROMPT = tuple(range(5, 20_005))
"""Its log probabilities take several messages."""


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as fake:
        yield fake


def asking(cluster: FakeCluster, max_tokens: int = 6) -> GenerationRequest:
    request = cluster.request(prompt=PROMPT, max_tokens=max_tokens)
    return replace(request, params=replace(request.params, prompt_logprobs=NUM_TOP))


def right() -> PromptLogprobs:
    found = PromptLogprobs.of_prompt(len(PROMPT), NUM_TOP)
    found.logprobs[:] = -np.arange(len(found))
    found.ranks[:] = 1
    return found


def scoring(
    then: PrefillScript = good_prefill, change: Callable[[list[worker_pb2.PromptLogprobs]], object] = len
) -> PrefillScript:
    """A prefill worker that sends the log probabilities, changed, and then follows a script."""

    async def script(worker: FakeWorker, request: worker_pb2.PrefillRequest) -> AsyncIterator[worker_pb2.PrefillEvent]:
        assert request.sequence.params.prompt_logprobs == NUM_TOP
        messages = list(pack_prompt_logprobs(right()))
        change(messages)
        for message in messages:
            yield worker_pb2.PrefillEvent(prompt_logprobs=message)
        async for event in then(worker, request):
            yield event

    return script


async def lost(worker: FakeWorker, request: worker_pb2.PrefillRequest) -> AsyncIterator[worker_pb2.PrefillEvent]:
    raise WorkerLostError("gone")
    yield


def check(chunks: list[TokenChunk], max_tokens: int = 6) -> None:
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens(max_tokens)
    first, *rest = [chunk.prompt_logprobs for chunk in chunks]
    assert first is not None
    assert np.array_equal(first.logprobs, right().logprobs)
    assert first.top_ids.shape == (len(PROMPT) - 1, NUM_TOP)
    assert rest == [None] * len(rest)


async def test_they_come_with_the_first_token_and_decode_workers_get_nothing_of_them(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_all(["p1", "d1"])
    prefill.scripts = [scoring()]
    check(await cluster.chunks(asking(cluster)))
    [request] = decode.requests
    assert not request.sequence.params.HasField("prompt_logprobs")


async def test_a_single_token_needs_no_decode_worker(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_all(["p1", "d1"])
    prefill.scripts = [scoring()]
    check(await cluster.chunks(asking(cluster, 1)), 1)
    assert decode.requests == []


async def test_a_lost_prefill_worker_is_replaced_and_all_are_sent_again(cluster: FakeCluster) -> None:
    bad, good, _ = await cluster.add_all(["p1", "p2", "d1"])
    bad.scripts, good.scripts = [scoring(lost, list.pop)], [scoring()]
    check(await cluster.chunks(asking(cluster)))
    assert (len(bad.requests), len(good.requests)) == (1, 1)


async def test_a_lost_decode_worker_does_not_repeat_them(cluster: FakeCluster) -> None:
    prefill, bad, good = await cluster.add_all(["p1", "d1", "d2"])
    prefill.scripts = [scoring()]
    bad.scripts = [decode_some(2, death)]
    check(await cluster.chunks(asking(cluster)))
    [request] = good.requests
    assert not request.sequence.params.HasField("prompt_logprobs")


@pytest.mark.parametrize(
    "change",
    [list.clear, list.pop, list.reverse, lambda messages: messages.append(messages[0])],
    ids=["none", "too_few", "out_of_order", "too_many"],
)
async def test_damaged_ones_go_to_another_worker(
    cluster: FakeCluster, change: Callable[[list[worker_pb2.PromptLogprobs]], object]
) -> None:
    bad, good, _ = await cluster.add_all(["p1", "p2", "d1"])
    bad.scripts, good.scripts = [scoring(change=change)], [scoring()]
    check(await cluster.chunks(asking(cluster)))
    assert (len(bad.requests), len(good.requests)) == (1, 1)
    await until(lambda: cluster.is_idle)


async def test_unwanted_ones_are_an_error(cluster: FakeCluster) -> None:
    [prefill, _] = await cluster.add_all(["p1", "d1"])

    async def script(worker: FakeWorker, request: worker_pb2.PrefillRequest) -> AsyncIterator[worker_pb2.PrefillEvent]:
        yield worker_pb2.PrefillEvent(prompt_logprobs=worker_pb2.PromptLogprobs())

    prefill.scripts = [script, script]
    with pytest.raises(InternalError, match="did not ask for any"):
        await cluster.run()


def local(then: DecodeScript = good_decode) -> DecodeScript:
    """A decode worker that computes the prompt itself."""

    async def script(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[worker_pb2.TokenBatch]:
        for message in pack_prompt_logprobs(right()):
            yield worker_pb2.TokenBatch(prompt_logprobs=message)
        async for batch in then(worker, request):
            yield batch

    return script


async def test_a_decode_worker_that_computes_the_prompt_sends_them() -> None:
    async with FakeCluster(routing=RoutingConfig(local_prefill="always")) as cluster:
        [decode] = await cluster.add_all(["d1"])
        decode.scripts = [local()]
        check(await cluster.chunks(asking(cluster)))
