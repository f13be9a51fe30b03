"""The connection to a worker: typed errors, cancellation, and clocks."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing

import pytest

from baton.core.errors import ChecksumError, DeadlineError, WorkerLostError
from baton.core.roles import DECODE, PREFILL
from baton.core.steps import StepProgress
from baton.core.timeline import Event, Timeline
from baton.rpc.certificates import Certificates, create_authority, issue_certificate
from baton.rpc.credentials import PeerCredentials
from baton.rpc.wire import worker_pb2
from cluster.registry.worker_client import WorkerClient
from tests.credentials import CREDENTIALS, connect
from tests.fake_workers import FakeWorker, decode_some, endless, expected_tokens, failing, hang
from tests.waiting import TIMEOUT_S, until


@pytest.fixture
async def worker():
    worker = FakeWorker("w", DECODE, clock_shift_s=5000.0)
    await worker.start()
    yield worker
    await worker.die()


@pytest.fixture
async def client(worker):
    client = connect(worker.address)
    yield client
    await client.close()


def generation(max_tokens: int = 4) -> worker_pb2.GenerateRequest:
    params = worker_pb2.SamplingParams(max_tokens=max_tokens)
    return worker_pb2.GenerateRequest(sequence=worker_pb2.Sequence(request_id="r", params=params))


async def read(client: WorkerClient, timeout_s: float = TIMEOUT_S) -> list[int]:
    async with aclosing(client.generate(generation(), timeout_s)) as batches:
        return [token async for batch in batches for token in batch.token_ids]


async def test_a_stream_ends_normally(client):
    assert await read(client) == expected_tokens(4)


async def test_an_error_keeps_its_class(client, worker):
    worker.scripts = [failing(ChecksumError("a part was damaged"))]
    with pytest.raises(ChecksumError, match="a part was damaged"):
        await read(client)


async def test_an_unreachable_worker_is_lost():
    client = connect("127.0.0.1:1")
    with pytest.raises(WorkerLostError):
        await read(client)
    with pytest.raises(WorkerLostError):
        await client.ping(TIMEOUT_S)
    await client.close()


async def test_an_exceeded_deadline_is_an_error(client, worker):
    worker.scripts = [hang]
    with pytest.raises(DeadlineError):
        await read(client, timeout_s=0.05)


async def test_closing_the_stream_cancels_the_call_at_once(client, worker):
    worker.scripts = [decode_some(1, endless)]
    async with aclosing(client.generate(generation(), TIMEOUT_S)) as batches:
        await anext(batches)
    async with asyncio.timeout(TIMEOUT_S):
        while worker.num_cancelled == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_closing_the_connection_is_a_lost_worker_and_not_a_cancellation(client, worker):
    worker.scripts = [hang]
    reading = asyncio.create_task(read(client))
    async with asyncio.timeout(TIMEOUT_S):
        while worker.num_open == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(WorkerLostError, match="has left the cluster"):
        await reading
    with pytest.raises(WorkerLostError, match="has left the cluster"):
        await read(client)
    with pytest.raises(WorkerLostError, match="has left the cluster"):
        await client.stats()
    with pytest.raises(WorkerLostError, match="has left the cluster"):
        await client.ping(TIMEOUT_S)


async def test_suspending_ends_open_calls_and_refuses_others_until_the_worker_is_trusted_again(client, worker):
    worker.scripts = [hang] * 3
    reading = [asyncio.create_task(read(client)) for _ in range(3)]
    await until(lambda: worker.num_open == 3)
    client.suspend("it has not answered for 3 s")
    for task in reading:
        with pytest.raises(WorkerLostError, match="is suspected: it has not answered for 3 s"):
            await task
    for call in (read(client), client.stats(), client.sync_clock()):
        with pytest.raises(WorkerLostError, match="is suspected"):
            await call
    await client.abandon("t")
    assert worker.abandoned == []
    await until(lambda: worker.num_cancelled == 3)  # the worker learns that its readers are gone
    assert await client.ping(TIMEOUT_S) == StepProgress(0)
    await client.probe(TIMEOUT_S)
    assert worker.num_probes == 1
    client.resume()
    assert await read(client) == expected_tokens(4)


async def test_suspending_ends_calls_to_a_process_that_accepts_connections_and_never_speaks():
    listening = socket.create_server(("127.0.0.1", 0))
    client = connect(f"127.0.0.1:{listening.getsockname()[1]}")
    reading = asyncio.create_task(read(client))
    pinging = asyncio.create_task(client.ping(TIMEOUT_S))
    await asyncio.sleep(0.05)
    client.suspend("it is silent")
    for task in (reading, pinging):
        with pytest.raises(WorkerLostError, match="it is silent"):
            await task
    with pytest.raises(DeadlineError):
        await client.ping(0.05)
    await client.close()
    listening.close()


async def test_cancelling_the_reader_stays_a_cancellation(client, worker):
    worker.scripts = [hang]
    reading = asyncio.create_task(read(client))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_event_times_are_converted_to_the_local_clock(client, worker):
    timeline = Timeline("r")
    timeline.record(Event.RECEIVED)
    await client.sync_clock()
    client.record(timeline, {Event.PREFILL_STARTED: await worker.later()})
    elapsed_ms = timeline.between_ms(Event.RECEIVED, Event.PREFILL_STARTED)
    assert elapsed_ms is not None
    assert 0 < elapsed_ms < 5_000_000  # the shift alone is 5000 s


async def test_events_of_an_unmeasured_clock_are_dropped(client):
    timeline = Timeline("r")
    client.record(timeline, {Event.PREFILL_STARTED: 1.0})
    assert timeline.events == {}


async def test_the_clock_of_the_same_machine_is_not_converted():
    worker = FakeWorker("w", PREFILL)
    await worker.start()
    client = connect(worker.address)
    await client.sync_clock()
    timeline = Timeline("r")
    client.record(timeline, {Event.PREFILL_STARTED: 123.25})
    assert timeline.events == {Event.PREFILL_STARTED: 123.25}
    await client.close()
    await worker.die()


async def test_a_clock_is_measured_periodically(client, worker):
    assert client.needs_sync
    await client.sync_clock()
    assert worker.num_pings > 1
    assert not client.needs_sync


async def test_a_failed_measurement_is_an_error_and_is_repeated_soon(client, worker, monkeypatch):
    monkeypatch.setattr("cluster.registry.worker_client._RETRY_SYNC_AFTER_S", 0.0)
    await worker.die()
    with pytest.raises(WorkerLostError):
        await client.sync_clock()
    assert client.needs_sync


async def test_a_worker_that_is_suspected_since_a_certificate_ended_is_asked_with_the_renewed_one():
    authority = create_authority(days=2)
    ended, good = (Certificates(authority[0], *issue_certificate(*authority, "node", days)) for days in (0, 2))
    held = [ended]
    worker = FakeWorker("w", DECODE, credentials=PeerCredentials(CREDENTIALS.secret, lambda: good))
    await worker.start()
    client = WorkerClient(worker.address, PeerCredentials(CREDENTIALS.secret, lambda: held[0]))
    with pytest.raises(WorkerLostError, match="broke"):
        await client.ping(TIMEOUT_S)
    client.suspend("it does not answer")
    with pytest.raises(WorkerLostError, match="broke"):
        await client.ping(TIMEOUT_S)
    held[0] = good
    await client.ping(TIMEOUT_S)
    await client.probe(TIMEOUT_S)
    client.resume()
    assert await read(client) == expected_tokens(4)
    await client.close()
    with pytest.raises(WorkerLostError, match="has left the cluster"):
        await client.ping(TIMEOUT_S)
    await worker.die()
