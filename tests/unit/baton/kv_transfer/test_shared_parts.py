"""Parts in shared memory on the receiver's side: valid, stale, forged and missing parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from baton.core.errors import ChecksumError, TransferError
from baton.core.kv_spec import KVCacheSpec
from baton.kv_transfer.base import KVSendStream, PartBuffer, PartHeader
from baton.kv_transfer.codec import checksum, encode_frame, encode_part, pack_part
from baton.kv_transfer.payload.segment import SharedSegment, Slot
from baton.kv_transfer.payload.shared_memory import SegmentMappings, SharedMemorySendPath
from baton.rpc.wire.kv_pb2 import KVFrame, KVReserve, KVSegment, KVSlot
from decode_worker.kv_import import CachePlace
from tests.kv_receiver import Receiver, SourceKV
from tests.tiny_models import random_prompts
from tests.unit.baton.kv_transfer.links import (
    RecordingSink,
    kv_server,
    send_all,
    slots_free,
    talk,
    transport_over,
)

PROMPT = random_prompts((22,))[0]
PART_BYTES = 1 << 16


@pytest.fixture
def source(receiver: Receiver) -> SourceKV:
    return SourceKV(receiver.spec, PROMPT)


@pytest.fixture
async def memory() -> AsyncIterator[SharedMemorySendPath]:
    made = SharedMemorySendPath(PART_BYTES)
    yield made
    made.close()


@pytest.fixture
def segment(memory: SharedMemorySendPath) -> SharedSegment:
    """The segment of ``memory``, even after ``memory`` is closed."""
    made = memory.segment()
    assert made is not None
    return made


async def send_alone(stream: KVSendStream, header: PartHeader, buffer: PartBuffer) -> None:
    await stream.send(header, buffer)
    await stream.commit()


async def arrived(receiver: Receiver, source: SourceKV, transfer_id: str = "transfer-1") -> None:
    imported = await receiver.importer.claim(transfer_id)
    assert await receiver.read(imported) == source.layers
    receiver.importer.release(imported)
    await receiver.all_given_back()


@pytest.mark.parametrize(
    ("sender_shares", "receiver_maps"),
    [(False, False), (False, True), (True, False)],
    ids=["neither", "receiver", "sender"],
)
async def test_without_agreement_of_both_sides_parts_travel_in_messages(
    receiver: Receiver,
    source: SourceKV,
    memory: SharedMemorySendPath,
    caplog: pytest.LogCaptureFixture,
    sender_shares: bool,
    receiver_maps: bool,
) -> None:
    caplog.set_level(logging.INFO)
    transport = transport_over(memory) if sender_shares else transport_over()
    async with kv_server(receiver.importer, SegmentMappings() if receiver_maps else None) as (_, peer):
        for number in range(2):
            stream = await transport.open(source.offer(f"transfer-{number}"), peer)
            assert stream.buffer(100) is None
            await send_all(stream, source)
            receiver.importer.release(await receiver.importer.claim(f"transfer-{number}"))
        await transport.close()
    told = [record.message for record in caplog.records if "does not read" in record.message]
    assert len(told) == sender_shares
    await receiver.all_given_back()


async def test_a_sender_invisible_to_the_receiver_sends_messages(
    receiver: Receiver, source: SourceKV, memory: SharedMemorySendPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host or in a container with its own processes, the path leads to nothing or to another file."""

    def elsewhere(self: SharedSegment) -> KVSegment:
        return KVSegment(pid=1, fd=0, token=bytes(16), num_slots=4, slot_bytes=4096)

    monkeypatch.setattr(SharedSegment, "offer", property(elsewhere))
    transport, mappings = transport_over(memory), SegmentMappings()
    async with kv_server(receiver.importer, mappings) as (_, peer):
        stream = await transport.open(source.offer(), peer)
        assert stream.buffer(100) is None
        await send_all(stream, source)
        await transport.close()
    assert len(mappings) == 0
    await arrived(receiver, source)


async def test_one_transfer_can_use_slots_and_messages(
    receiver: Receiver, source: SourceKV, memory: SharedMemorySendPath, segment: SharedSegment
) -> None:
    transport = transport_over(memory)
    async with kv_server(receiver.importer, SegmentMappings()) as (_, peer):
        stream = await transport.open(source.offer(), peer)
        for number, (header, payload) in enumerate(source.parts()):
            buffer = stream.buffer(len(payload)) if number % 2 else None
            if buffer is None:
                await stream.send(header, payload)
            else:
                buffer.view[:] = payload
                await stream.send(header, buffer)
        assert await stream.commit() == len(PROMPT) * source.spec.bytes_per_token
        await transport.close()
    await arrived(receiver, source)
    await slots_free(segment)


async def test_a_buffer_of_another_transport_is_refused(source: SourceKV, memory: SharedMemorySendPath) -> None:
    @dataclass
    class Foreign:
        view: memoryview
        checksum: int | None = None

        def __len__(self) -> int:
            return len(self.view)

        def fill(self, views: Sequence[memoryview]) -> None: ...

        def release(self) -> None: ...

    transport = transport_over(memory)
    async with kv_server(RecordingSink(), SegmentMappings()) as (_, peer):
        stream = await transport.open(source.offer(), peer)
        with pytest.raises(TransferError, match="a different transport"):
            await stream.send(PartHeader(0, 1, 0, 1), Foreign(memoryview(bytearray(8))))
        await stream.abort()
        await transport.close()


async def test_parts_without_a_fitting_free_slot_get_no_buffer(
    source: SourceKV, memory: SharedMemorySendPath, segment: SharedSegment
) -> None:
    transport = transport_over(memory)
    async with kv_server(RecordingSink(), SegmentMappings()) as (_, peer):
        first = await transport.open(source.offer("first"), peer)
        second = await transport.open(source.offer("second"), peer)
        assert first.buffer(PART_BYTES + 1) is None
        held = [first.buffer(100) for _ in range(segment.layout.num_slots)]
        assert None not in held
        assert second.buffer(100) is None
        for buffer in held:
            assert buffer is not None
            buffer.release()
        await asyncio.gather(first.abort(), second.abort())
        await transport.close()
    await slots_free(segment)


async def test_slots_are_kept_until_the_receiver_has_stored_their_content(
    source: SourceKV, memory: SharedMemorySendPath, segment: SharedSegment
) -> None:
    sink, transport = RecordingSink(), transport_over(memory)
    async with kv_server(sink, SegmentMappings()) as (_, peer):
        stream = await transport.open(source.offer(), peer)
        for _ in range(5):
            buffer = stream.buffer(100)
            assert buffer is not None
            await stream.send(PartHeader(0, 1, 0, 1), buffer)
        await asyncio.sleep(0.05)
        assert segment.num_free_slots == segment.layout.num_slots - 5
        sink.gate.set()
        await slots_free(segment)  # before the commit
        assert await stream.commit() == 500
        await transport.close()


async def test_a_failed_or_cancelled_send_frees_its_slot(
    source: SourceKV, memory: SharedMemorySendPath, segment: SharedSegment
) -> None:
    sink, transport = RecordingSink(), transport_over(memory, max_inflight_bytes=100)
    async with kv_server(sink, SegmentMappings()) as (_, peer):
        stream = await transport.open(source.offer(), peer)
        first, second = stream.buffer(100), stream.buffer(100)
        assert first is not None
        assert second is not None
        await stream.send(PartHeader(0, 1, 0, 1), first)
        waiting = asyncio.create_task(stream.send(PartHeader(0, 1, 0, 1), second))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert segment.num_free_slots == segment.layout.num_slots - 1
        await stream.abort()
        assert segment.num_free_slots == segment.layout.num_slots
        late = segment.take(100)
        assert late is not None
        with pytest.raises(TransferError):
            await stream.send(PartHeader(0, 1, 0, 1), late)
        assert segment.num_free_slots == segment.layout.num_slots
        await transport.close()


async def test_content_that_changes_after_its_checksum_is_detected(
    receiver: Receiver, source: SourceKV, memory: SharedMemorySendPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = transport_over(memory)
    async with kv_server(receiver.importer, SegmentMappings()) as (_, peer):
        stream = await transport.open(source.offer(), peer)
        header, payload = next(source.parts())
        buffer = stream.buffer(len(payload))
        assert buffer is not None
        buffer.view[:] = payload

        def scribbling_checksum(data: memoryview) -> int:
            digest = checksum(data)
            data[-1] ^= 1
            return digest

        monkeypatch.setattr("baton.kv_transfer.sender.checksum", scribbling_checksum)
        with pytest.raises(ChecksumError, match="corrupted"):
            await send_alone(stream, header, buffer)
        await stream.abort()
        await transport.close()
    await receiver.all_given_back()


async def test_the_checksum_is_computed_when_the_buffer_is_filled(
    receiver: Receiver, source: SourceKV, memory: SharedMemorySendPath
) -> None:
    """It is not computed again when the part is sent, so that damage in between is found."""
    transport = transport_over(memory)
    header, payload = next(source.parts())
    async with kv_server(receiver.importer, SegmentMappings()) as (_, peer):
        stream = await transport.open(source.offer(), peer)
        buffer = stream.buffer(len(payload))
        assert buffer is not None
        buffer.fill([memoryview(payload)[:5], memoryview(payload)[5:]])
        assert bytes(buffer.view) == payload
        assert buffer.checksum == checksum(payload)
        buffer.view[-1] ^= 1
        with pytest.raises(ChecksumError, match="corrupted"):
            await send_alone(stream, header, buffer)
        await stream.abort()
        await transport.close()
    await receiver.all_given_back()


@dataclass
class ReusingSink(RecordingSink):
    """While it reads a slot, the sender gives the slot to another receiver."""

    slot: Slot | None = None
    owner: SharedSegment | None = None

    def reuse(self) -> None:
        assert self.slot is not None
        assert self.owner is not None
        self.slot.release()
        assert self.owner.take(1) is not None

    async def write(self, transfer_id: str, header: PartHeader, payload: memoryview, checksum: int) -> None:
        self.reuse()
        await super().write(transfer_id, header, payload, checksum)


class PlacingSink(ReusingSink):
    """The same while the slot is copied to where its part belongs."""

    num_placed = 0

    def place(self, transfer_id: str, header: PartHeader, num_bytes: int) -> CachePlace:
        async def filled(found: int, checksum: int) -> None:
            assert found == checksum, "nobody has written into the slot"
            self.num_placed += 1

        return CachePlace([memoryview(bytearray(num_bytes))], self.reuse, filled)


@pytest.mark.parametrize("kind", [ReusingSink, PlacingSink])
async def test_data_read_from_a_reused_slot_is_never_committed(
    source: SourceKV, memory: SharedMemorySendPath, segment: SharedSegment, kind: type[ReusingSink]
) -> None:
    sink, transport = kind(owner=segment), transport_over(memory)
    sink.gate.set()
    async with kv_server(sink, SegmentMappings()) as (_, peer):
        stream = await transport.open(source.offer(), peer)
        sink.slot = stream.buffer(100)
        assert sink.slot is not None
        with pytest.raises(TransferError, match="did not wait for it to be read"):
            await send_alone(stream, PartHeader(0, 1, 0, 1), sink.slot)
        await stream.abort()
        await transport.close()
    assert len(sink.aborts) == 1
    if isinstance(sink, PlacingSink):
        assert sink.num_placed == 1


def reserve(spec: KVCacheSpec, offered: KVSegment | None) -> bytes:
    message = KVReserve(
        transfer_id="transfer-1",
        spec_json=spec.to_json(),
        spec_fingerprint=spec.fingerprint(),
        token_ids=PROMPT,
        deadline_s=1.0,
        segment=offered,
    )
    return encode_frame(KVFrame(reserve=message))


def first_part(source: SourceKV, slot: KVSlot, payload: bytes = b"", digest: int = 0) -> bytes:
    header, _ = next(source.parts())
    part = pack_part(header, digest)
    part.slot.CopyFrom(slot)
    return encode_part(part, payload)


MADE_UP: dict[str, dict[str, Any]] = {
    "beyond the slots": {"index": 10_000},
    "beyond the slot": {"num_bytes": 2**63},
    "nothing": {"num_bytes": 0},
    "another length": {"num_bytes": 1},
    "never used": {"index": 1, "generation": 0},
    "used before": {"generation": 0},
    "not used yet": {"generation": 2},
}


@pytest.mark.parametrize("changes", MADE_UP.values(), ids=MADE_UP.keys())
async def test_invented_slot_positions_end_the_transfer(
    receiver: Receiver, source: SourceKV, memory: SharedMemorySendPath, segment: SharedSegment, changes: dict[str, Any]
) -> None:
    _, payload = next(source.parts())
    slot = segment.take(len(payload))
    assert slot is not None
    slot.view[:] = payload
    true = {"index": slot.index, "generation": slot.generation, "num_bytes": len(slot)}
    frames = [
        reserve(receiver.spec, segment.offer),
        first_part(source, slot.reference, digest=checksum(payload)),
        first_part(source, KVSlot(**{**true, **changes}), digest=checksum(payload)),
    ]
    async with kv_server(receiver.importer, SegmentMappings()) as (_, peer):
        replies, code = await talk(peer, [frames[0], frames[2]])
        assert replies == ["reserved", f"failed: {TransferError.code}"]
        assert code == TransferError.code
        await receiver.all_given_back()
        with pytest.raises(TransferError):
            await receiver.importer.claim("transfer-1")
        replies, _ = await talk(peer, [frames[0], frames[1]])  # the true one is taken; what then lacks is the rest
        assert replies[:2] == ["reserved", "received"]
    await receiver.all_given_back()


@pytest.mark.parametrize("case", ["nothing offered", "not mapped", "payload too"])
async def test_unnegotiated_slots_and_payload_beside_a_slot_are_refused(
    receiver: Receiver, source: SourceKV, memory: SharedMemorySendPath, segment: SharedSegment, case: str
) -> None:
    slot = segment.take(100)
    assert slot is not None
    offered = None if case == "nothing offered" else segment.offer
    mappings = None if case == "not mapped" else SegmentMappings()
    frames = [reserve(receiver.spec, offered), first_part(source, slot.reference, b"payload" * (case == "payload too"))]
    async with kv_server(receiver.importer, mappings) as (_, peer):
        replies, code = await talk(peer, frames)
    assert replies == ["reserved", f"failed: {TransferError.code}"]
    assert code == TransferError.code
    await receiver.all_given_back()
