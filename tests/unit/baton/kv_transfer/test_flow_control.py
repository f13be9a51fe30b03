"""A slow receiver makes the sender wait with bounded buffers; a broken receiver ends the transfer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

import pytest

from baton.core.errors import InternalError, OutOfBlocksError, WorkerLostError
from baton.core.kv_spec import KVCacheSpec, LayerSpec
from baton.kv_transfer.base import KVSendStream, PartHeader, TransferOffer
from baton.kv_transfer.codec import pack_part
from baton.kv_transfer.flow import Throttle
from baton.kv_transfer.kv_transfer_config import KVTransferConfig
from baton.kv_transfer.payload.base import PartIntake, PartReceiver, ReceivePath
from baton.kv_transfer.payload.inline import InlineReceiver
from baton.rpc.channel import MAX_MESSAGE_BYTES
from baton.rpc.wire.kv_pb2 import KVReserve, KVReserved
from tests.unit.baton.kv_transfer.links import TRANSPORTS, RecordingSink, link, serving, transport_over
from tests.waiting import TIMEOUT_S

SPEC = KVCacheSpec("model", "float32", 4, (LayerSpec(1, 4, 4),))
OFFER = TransferOffer("transfer-1", SPEC, (1, 2, 3), 1.0)
PART_BYTES = 64 * 1024
WINDOW = 4 * PART_BYTES
STRIPE_BYTES = 10_000
HEADER = PartHeader(0, 1, 0, 1)


async def send_many(stream: KVSendStream, count: int) -> None:
    for _ in range(count):
        await stream.send(HEADER, bytes(PART_BYTES))


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_stalled_receiver_stops_the_sender(kind: str) -> None:
    sink, num_sent = RecordingSink(), 0
    async with link(kind, sink, max_inflight_bytes=WINDOW, stripe_bytes=STRIPE_BYTES) as way:
        stream = await way.transport.open(OFFER, way.peer)

        async def push() -> None:
            nonlocal num_sent
            for _ in range(100):
                await stream.send(HEADER, bytes(PART_BYTES))
                num_sent += 1

        pushing = asyncio.create_task(push())
        await asyncio.sleep(0.3)
        assert not pushing.done()
        assert num_sent <= WINDOW // PART_BYTES
        sink.gate.set()
        await pushing
        assert await stream.commit() == sink.num_bytes == 100 * PART_BYTES


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_bytes_in_flight_are_always_bounded(kind: str) -> None:
    sink = RecordingSink()
    sink.gate.set()
    most = 0
    async with link(kind, sink, max_inflight_bytes=WINDOW, stripe_bytes=STRIPE_BYTES) as way:
        stream = await way.transport.open(OFFER, way.peer)
        for sent in range(1, 301):
            await stream.send(HEADER, bytes(PART_BYTES))
            most = max(most, sent * PART_BYTES - sink.num_bytes)
        await stream.commit()
    assert most <= WINDOW


@pytest.mark.parametrize("commits", ["at once", "when all is written"])
@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_acknowledgements_grow_to_the_total_before_the_commit(kind: str, commits: str) -> None:
    sink, told = RecordingSink(), list[int]()
    sink.gate.set()
    async with link(kind, sink, max_inflight_bytes=WINDOW, stripe_bytes=STRIPE_BYTES) as way:
        stream = await way.transport.open(OFFER, way.peer)
        stream.on_acknowledged = told.append
        await send_many(stream, 50)
        async with asyncio.timeout(TIMEOUT_S):
            while commits != "at once" and told[-1:] != [50 * PART_BYTES]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await stream.commit()
    assert told == sorted(set(told))
    assert told[-1] == sink.num_bytes == 50 * PART_BYTES


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_part_larger_than_the_window_is_still_sent(kind: str) -> None:
    sink = RecordingSink()
    sink.gate.set()
    async with link(kind, sink, max_inflight_bytes=1000) as way:
        stream = await way.transport.open(OFFER, way.peer)
        for _ in range(3):
            await stream.send(HEADER, bytes(PART_BYTES))
        assert await stream.commit() == 3 * PART_BYTES


async def test_the_largest_configurable_part_fits_into_a_message() -> None:
    field = KVTransferConfig.model_fields["part_bytes"]
    largest = next(item.le for item in field.metadata if hasattr(item, "le"))
    assert get_args(field.annotation) == ()  # a plain int, whose metadata is the limit
    part = pack_part(PartHeader(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1), 2**64 - 1)
    assert largest + part.ByteSize() + 20 <= MAX_MESSAGE_BYTES

    sink = RecordingSink()
    sink.gate.set()
    async with link("grpc", sink) as way:
        stream = await way.transport.open(OFFER, way.peer)
        await stream.send(HEADER, bytes(largest))
        assert await stream.commit() == largest


class _BrokenPath(ReceivePath):
    """Its reading has failed before the receiver waits for a frame, as when the reservation's answer is slow."""

    @asynccontextmanager
    async def accept(self, reserve: KVReserve, reserved: KVReserved, intake: PartIntake) -> AsyncIterator[PartReceiver]:
        parts = InlineReceiver(intake)
        parts.reading = asyncio.get_running_loop().create_future()
        parts.reading.set_exception(OutOfBlocksError("no room left"))
        yield parts


async def test_an_error_from_before_the_first_frame_ends_the_transfer() -> None:
    sink = RecordingSink()
    async with serving(sink, [_BrokenPath()]) as (_, peer):
        transport = transport_over()
        stream = await transport.open(OFFER, peer)
        async with asyncio.timeout(TIMEOUT_S):
            while not sink.aborts:  # noqa: ASYNC110 - although the sender sends nothing
                await asyncio.sleep(0.005)
        with pytest.raises(OutOfBlocksError, match="no room left"):
            await stream.commit()
        await stream.abort()
        await transport.close()
    assert sink.aborts == ["no room left"]


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_an_error_of_the_receiver_reaches_a_busy_sender(kind: str) -> None:
    """gRPC loses the status of a call that ends while the client writes (grpc/grpc issue 36066)."""
    for _ in range(20):
        sink = RecordingSink(failure=OutOfBlocksError("no room left"))
        sink.gate.set()
        async with link(kind, sink, max_inflight_bytes=WINDOW, stripe_bytes=STRIPE_BYTES) as way:
            stream = await way.transport.open(OFFER, way.peer)
            with pytest.raises(OutOfBlocksError, match="no room left"):
                await send_many(stream, 1000)
            await stream.abort()
            assert sink.aborts == ["no room left"]


async def test_a_fault_in_the_receiver_is_an_internal_error_and_the_server_continues() -> None:
    sink = RecordingSink(failure=ZeroDivisionError("bug"))
    sink.gate.set()
    async with link("grpc", sink) as way:
        stream = await way.transport.open(OFFER, way.peer)
        with pytest.raises(InternalError, match="request id transfer-1") as raised:
            await send_many(stream, 1000)
        assert "bug" not in raised.value.message  # which may hold anything; it is for the log
        sink.failure = None
        again = await way.transport.open(OFFER, way.peer)
        await again.send(HEADER, bytes(8))
        await again.commit()
    assert sink.aborts == [raised.value.message]


@pytest.mark.parametrize("stage", ["reserved", "pushing", "committing"])
async def test_a_lost_receiver_ends_the_transfer_at_once(stage: str) -> None:
    sink = RecordingSink()
    async with link("grpc", sink, max_inflight_bytes=WINDOW) as way:
        stream = await way.transport.open(OFFER, way.peer)

        async def push() -> None:
            if stage == "pushing":
                await send_many(stream, 100)
            await stream.commit()

        pushing = asyncio.create_task(push()) if stage != "reserved" else None
        await asyncio.sleep(0.05)
        assert way.server is not None
        await way.server.stop(grace=0)
        with pytest.raises(WorkerLostError):
            await (pushing or stream.commit())


async def test_a_lost_sender_is_noticed_at_once() -> None:
    sink = RecordingSink()
    async with link("grpc", sink, max_inflight_bytes=WINDOW) as way:
        stream = await way.transport.open(OFFER, way.peer)
        await stream.send(HEADER, bytes(PART_BYTES))
        await way.transport.close()
        async with asyncio.timeout(TIMEOUT_S):
            while not sink.aborts:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert sink.aborts == ["the sender disconnected"]


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_cancelling_during_the_commit_notifies_the_receiver(kind: str) -> None:
    sink = RecordingSink()
    async with link(kind, sink) as way:
        stream = await way.transport.open(OFFER, way.peer)
        committing = asyncio.create_task(stream.commit())
        await asyncio.sleep(0.05)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        await stream.abort()
        async with asyncio.timeout(TIMEOUT_S):
            while not sink.aborts:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_a_throttle_limits_the_rate() -> None:
    throttle = Throttle(1_000_000)
    await throttle.take(100_000)  # the burst
    started_s = time.monotonic()
    await asyncio.gather(*(throttle.take(20_000) for _ in range(10)))
    assert time.monotonic() - started_s >= 0.19


async def test_a_throttle_does_not_accumulate_idle_time() -> None:
    throttle = Throttle(1_000_000)
    await throttle.take(1)
    await asyncio.sleep(0.3)
    started_s = time.monotonic()
    await throttle.take(200_000)
    assert time.monotonic() - started_s >= 0.09


@pytest.mark.parametrize("rate", [0, -1.0])
def test_a_throttle_needs_a_positive_rate(rate: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Throttle(rate)
