"""A transfer waits without limit for its prompt, up to a limit for its receiver, and not for lost peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from baton.core.errors import InternalError, OutOfBlocksError, TransferError, WorkerLostError
from baton.core.kv_spec import KVCacheSpec, LayerSpec
from baton.kv_transfer.base import KVSendStream, PartHeader, Reservation, TransferOffer
from baton.kv_transfer.payload.inline import InlineReceivePath
from baton.kv_transfer.receiver import KVTransferService
from baton.kv_transfer.sender import METHOD, SERVICE, GrpcKVTransport
from baton.rpc.channel import PeerServer, create_channel
from tests.credentials import CREDENTIALS
from tests.unit.baton.kv_transfer.links import RecordingSink, transport_over
from tests.waiting import TIMEOUT_S

SPEC = KVCacheSpec("model", "float32", 4, (LayerSpec(1, 4, 4),))
HEADER = PartHeader(0, 1, 0, 1)
PART_BYTES = 64 * 1024
STALL_S = 0.5


def offer(transfer_id: str = "transfer-1", deadline_s: float = 20.0) -> TransferOffer:
    return TransferOffer(transfer_id, SPEC, (1, 2, 3), deadline_s)


@dataclass(slots=True)
class ChoosySink(RecordingSink):
    """
    Attributes:
        room: reservations wait for it.
        lost: transfers whose reservation ends as if this worker were lost.
    """

    room: asyncio.Event = field(default_factory=asyncio.Event)
    lost: tuple[str, ...] = ()

    async def reserve(self, offer: TransferOffer) -> Reservation:
        if offer.transfer_id in self.lost:
            raise WorkerLostError("this worker is shutting down")
        await self.room.wait()
        return Reservation(0)


@asynccontextmanager
async def receiving(sink: RecordingSink, silence_s: float = 60.0) -> AsyncIterator[str]:
    server = PeerServer(CREDENTIALS)
    KVTransferService(sink, [InlineReceivePath()], silence_s).add_to(server.grpc)
    peer = server.bind("127.0.0.1")
    await server.start()
    try:
        yield peer
    finally:
        await server.stop(grace=0)


@asynccontextmanager
async def sending(timeout_s: float = STALL_S) -> AsyncIterator[GrpcKVTransport]:
    transport = transport_over(timeout_s=timeout_s, max_inflight_bytes=2 * PART_BYTES)
    try:
        yield transport
    finally:
        await transport.close()


async def send_endlessly(stream: KVSendStream) -> None:
    while True:
        await stream.send(HEADER, bytes(PART_BYTES))


async def test_a_prompt_can_take_longer_than_the_timeouts_of_the_receiver() -> None:
    sink = RecordingSink()
    sink.gate.set()
    async with receiving(sink) as peer, sending(timeout_s=1.0) as transport:
        stream = await transport.open(offer(), peer)
        await stream.send(HEADER, bytes(PART_BYTES))
        await asyncio.sleep(1.2)  # until the prefill's next chunk
        await stream.send(HEADER, bytes(PART_BYTES))
        assert await stream.commit() == 2 * PART_BYTES
    assert not sink.aborts


async def test_unacknowledged_parts_end_the_transfer() -> None:
    sink = RecordingSink()
    async with receiving(sink) as peer, sending() as transport:
        stream = await transport.open(offer(), peer)
        with pytest.raises(TransferError, match="transfer_timeout_s"):
            await send_endlessly(stream)


async def test_an_unanswered_commit_ends_the_transfer() -> None:
    sink = RecordingSink()
    async with receiving(sink) as peer, sending() as transport:
        stream = await transport.open(offer(), peer)
        with pytest.raises(TransferError, match="transfer_timeout_s"):
            await stream.commit()


async def test_an_unanswered_reservation_ends_the_transfer() -> None:
    sink = ChoosySink()
    async with receiving(sink) as peer, sending() as transport:
        with pytest.raises(TransferError, match="transfer_timeout_s"):
            await transport.open(offer(deadline_s=0.0), peer)


async def test_waiting_for_room_has_its_own_limit() -> None:
    sink = ChoosySink()
    async with receiving(sink) as peer, sending() as transport:
        opening = asyncio.create_task(transport.open(offer(deadline_s=60.0), peer))
        await asyncio.sleep(2 * STALL_S)
        sink.room.set()
        await opening


async def test_a_sender_that_is_silent_too_long_is_lost() -> None:
    """One whose host is lost closes no connection."""
    sink = RecordingSink()
    async with receiving(sink, silence_s=0.05) as peer, sending(timeout_s=20.0) as transport:
        stream = await transport.open(offer(), peer)
        async with asyncio.timeout(TIMEOUT_S):
            while not sink.aborts:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(TransferError, match=r"sent nothing for 0\.05 s"):
            await stream.commit()
    assert sink.aborts == ["the sender sent nothing for 0.05 s."]


async def test_every_failure_to_read_replies_ends_the_transfer(caplog: pytest.LogCaptureFixture) -> None:
    sink = RecordingSink()
    sink.gate.set()

    def fail(num_bytes: int) -> None:
        raise KeyError("a bug")

    async with receiving(sink) as peer, sending(timeout_s=20.0) as transport:
        stream = await transport.open(offer(), peer)
        stream.on_acknowledged = fail
        with pytest.raises(InternalError, match="failed unexpectedly"):
            await send_endlessly(stream)
        await stream.abort()
    assert "a bug" in caplog.text


async def test_a_lost_reservation_affects_no_other_transfer() -> None:
    sink = ChoosySink(lost=("lost",))
    sink.gate.set()
    sink.room.set()
    async with receiving(sink) as peer, sending(timeout_s=20.0) as transport:
        before = await transport.open(offer("before"), peer)
        with pytest.raises(WorkerLostError, match="shutting down"):
            await transport.open(offer("lost"), peer)
        after = await transport.open(offer("after"), peer)
        await before.send(HEADER, bytes(PART_BYTES))
        assert await before.commit() == PART_BYTES
        await after.commit()
    assert not sink.aborts


async def test_a_sender_shows_that_it_lives_while_its_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv_transfer.sender.ALIVE_EVERY_S", 0.02)
    sink = RecordingSink()
    sink.gate.set()
    async with receiving(sink, silence_s=0.6) as peer, sending(timeout_s=20.0) as transport:
        stream = await transport.open(offer(), peer)
        await asyncio.sleep(1.5)
        assert await stream.commit() == 0
    assert not sink.aborts


async def test_a_stream_that_sends_nothing_is_ended() -> None:
    async with receiving(RecordingSink(), silence_s=0.05) as peer:
        channel = create_channel(peer, CREDENTIALS)
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=CREDENTIALS.call_metadata(peer))
        async with asyncio.timeout(TIMEOUT_S):
            assert "sent nothing for 0.05 s" in await call.details()
        await channel.close()


async def test_the_number_of_open_transfers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv_transfer.receiver._MAX_OPEN_TRANSFERS", 2)
    async with receiving(RecordingSink()) as peer, sending(timeout_s=20.0) as transport:
        streams = [await transport.open(offer(name), peer) for name in ("first", "second")]
        with pytest.raises(OutOfBlocksError, match="2 open transfers"):
            await transport.open(offer("third"), peer)
        await streams[0].abort()
        async with asyncio.timeout(TIMEOUT_S):
            while not await _opens(transport, peer):  # noqa: ASYNC110 - the receiver notices the end a moment later
                await asyncio.sleep(0.01)


async def _opens(transport: GrpcKVTransport, peer: str) -> bool:
    try:
        await transport.open(offer("later"), peer)
    except OutOfBlocksError:
        return False
    return True


async def test_a_sender_cannot_make_its_reservation_wait_for_days() -> None:
    sink = WaitingSink()
    async with receiving(sink) as peer, sending(timeout_s=20.0) as transport:
        await transport.open(offer(deadline_s=86_400.0), peer)
    assert sink.deadlines_s == [30.0]


@dataclass(slots=True)
class WaitingSink(RecordingSink):
    deadlines_s: list[float] = field(default_factory=list)

    async def reserve(self, offer: TransferOffer) -> Reservation:
        self.deadlines_s.append(offer.deadline_s)
        return Reservation(0)
