"""Local prefill through the router: a decode worker computes the prompt and goes on, over real gRPC connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.core.errors import InvalidRequestError, OutOfBlocksError, TransferError
from baton.core.timeline import Event
from baton.rpc.conversions import pack_events
from baton.rpc.wire import worker_pb2
from cluster.routing.routing_config import RoutingConfig
from tests.fake_workers import FakeCluster, FakeWorker, batch, decode_some, expected_tokens, failing, hang
from tests.waiting import until


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(routing=RoutingConfig(local_prefill="always")) as fake:
        yield fake


async def local_prefill(
    worker: FakeWorker, request: worker_pb2.GenerateRequest
) -> AsyncIterator[worker_pb2.TokenBatch]:
    """Answers like a decode worker, which sends its events with the first token."""
    received_s, started_s = worker.now(), await worker.later()
    for position in range(request.sequence.params.max_tokens):
        message = batch(request, position)
        now_s = await worker.later()
        message.steps.add(index=position + 1, started_s=now_s - 0.01, ended_s=now_s, busy_s=0.01, num_steps=1)
        if position == 0:
            message.num_cached_tokens = 2
            events = {
                Event.DECODE_RECEIVED: received_s,
                Event.DECODE_QUEUED: received_s,
                Event.DECODE_STARTED: started_s,
            }
            message.events.extend(pack_events(events))
        yield message


async def test_the_decode_worker_runs_prefill_and_decode(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_all(["p1", "d1"])
    decode.scripts = [local_prefill]
    request = cluster.request()
    chunks = await cluster.chunks(request)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens(6)
    assert chunks[0].num_cached_tokens == 2
    assert prefill.requests == []
    [sent] = decode.requests
    assert (sent.transfer_id, list(sent.sequence.output_token_ids)) == ("", [])
    await until(lambda: cluster.is_idle)
    assert cluster.metric("baton_local_prefills_total", reason="chosen") == 1
    assert cluster.metric("baton_routes_total", kind="local") == 1
    attributes = request.timeline.attributes
    assert "prefill_worker" not in attributes
    assert (attributes["local_worker"], attributes["decode_worker"], attributes["cached_tokens"]) == ("d1", "d1", 2)


async def test_local_prefill_counts_as_prefill_in_the_timeline(cluster: FakeCluster) -> None:
    [decode] = await cluster.add_all(["d1"])
    decode.scripts = [local_prefill]
    request = cluster.request()
    await cluster.run(request)
    shown = cluster.timelines.to_dict("r")
    assert shown is not None
    names = [event["name"] for event in shown["events"]]
    assert names == [
        "received",
        "tokenized",
        "admitted",
        "routed",
        "prefill_queued",
        "prefill_started",
        "first_token_sampled",
        "first_token",
        "second_token",
        "finished",
    ]
    assert [len(shown[log]["kept"]) for log in ("prefill_steps", "decode_steps")] == [1, 5]
    assert {"prefill_queue", "prefill", "decode"} <= {stage["name"] for stage in shown["stages"]}
    assert shown["time_to_first_token"]["duration_ms"] == pytest.approx(request.timeline.ttft_ms, abs=0.01)


async def test_the_routing_record_reports_local_prefill(cluster: FakeCluster) -> None:
    await cluster.add_all(["p1", "d1"])
    request = cluster.request()
    await cluster.run(request)
    record = request.timeline.to_dict()["routing"]
    assert isinstance(record, dict)
    [candidate] = record["candidates"]
    assert (candidate["prefill"], candidate["decode"], candidate["chosen"]) == (None, "d1", True)
    assert record["actual"]["decode"] == "d1"
    assert record["actual"]["ttft_ms"] == pytest.approx(request.timeline.ttft_ms, abs=0.01)
    assert record["actual"]["tpot_ms"] == pytest.approx(request.timeline.tpot_ms(6), abs=0.001)


async def test_local_prefill_has_its_own_prediction_errors(cluster: FakeCluster) -> None:
    await cluster.add_all(["p1", "d1"])
    for number in range(3):
        await cluster.run(cluster.request(str(number)))
    model = cluster.predictions.model
    assert model.ttft_calibration.of(contended=False, local=True).factor != 1.0
    assert model.ttft_calibration.of(contended=False).factor == 1.0
    summary = cluster.metrics.prediction_errors.summary()
    assert {kind: errors["requests"] for kind, errors in summary.items()} == {"ttft": 3, "tpot": 3}
    assert model._links == {}


async def test_local_prefill_fails_over_before_and_after_the_first_token(cluster: FakeCluster) -> None:
    first, second = await cluster.add_all(["d1", "d2"])
    first.scripts = [failing(OutOfBlocksError("full"))]
    second.scripts = [decode_some(3, TransferError("gone"))]
    assert await cluster.run() == expected_tokens(6)
    await until(lambda: cluster.is_idle)
    assert cluster.metric("baton_retries_total", reason="out_of_kv_blocks") == 1
    assert list(first.requests[-1].sequence.output_token_ids) == expected_tokens(3)
    assert cluster.metric("baton_local_prefills_total", reason="recovery") == 1


async def test_an_error_of_the_request_itself_is_not_retried(cluster: FakeCluster) -> None:
    decode, _ = await cluster.add_all(["d1", "d2"])
    decode.scripts = [failing(InvalidRequestError("no"))]
    with pytest.raises(InvalidRequestError):
        await cluster.run()
    await until(lambda: cluster.is_idle)


async def test_a_disconnect_cancels_local_prefill(cluster: FakeCluster) -> None:
    [decode] = await cluster.add_all(["d1"])
    decode.scripts = [hang]
    running = asyncio.create_task(cluster.run())
    await until(lambda: decode.num_open == 1)
    assert cluster.in_flight("d1") == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: cluster.is_idle)
    assert decode.num_cancelled == 1
    assert not cluster.predictions.ledger.computes_prompts("d1")


async def test_by_default_the_latency_model_chooses_local_prefill() -> None:
    async with FakeCluster(routing=RoutingConfig()) as cluster:
        prefill, decode = await cluster.add_all(["p1", "d1"])
        assert await cluster.run() == expected_tokens(6)
        assert (len(prefill.requests), len(decode.requests)) == (0, 1), "four tokens are not worth a hand-off"


async def test_workers_receive_the_priority_of_a_request() -> None:
    async with FakeCluster() as cluster:
        prefill, decode = await cluster.add_all(["p1", "d1"])
        request = cluster.request()
        await cluster.run(request)
        for message in (prefill.requests[0], decode.requests[0]):
            sequence = message.sequence
            assert sequence.queue_priority.priority == request.slo.priority
            assert 0 < sequence.queue_priority.due_in_s <= request.slo.ttft_s
            assert sequence.queue_priority.patience_s == request.slo.ttft_s
            assert sequence.tpot_target_s == request.slo.tpot_s
