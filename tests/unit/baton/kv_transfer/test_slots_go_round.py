"""Parts of any size through few slots: every byte arrives, whichever way its part went."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv_transfer.base import PartBuffer, PartHeader, Reservation, TransferOffer
from baton.kv_transfer.codec import checksum
from baton.kv_transfer.payload.shared_memory import SegmentMappings, SharedMemorySendPath
from tests.unit.baton.kv_transfer.kv_peers import offer
from tests.unit.baton.kv_transfer.links import kv_server, slots_free, transport_over


@dataclass
class CollectingSink:
    """Keeps what comes, by transfer, and takes its time now and then."""

    content: dict[str, bytearray] = field(default_factory=dict)
    num_writes: int = 0

    async def reserve(self, offer: TransferOffer) -> Reservation:
        self.content[offer.transfer_id] = bytearray()
        return Reservation(0)

    async def write(self, transfer_id: str, header: PartHeader, payload: memoryview, digest: int) -> None:
        assert checksum(payload) == digest
        self.num_writes += 1
        if self.num_writes % 7 == 0:
            await asyncio.sleep(0.001)
        self.content[transfer_id] += payload

    def place(self, transfer_id: str, header: PartHeader, num_bytes: int) -> None:
        return

    async def commit(self, transfer_id: str, draft_state: bytes | None = None) -> int:
        return len(self.content[transfer_id])

    def abort(self, transfer_id: str, reason: str) -> None:
        raise AssertionError(reason)


SLOT_BYTES = 4096
sizes = st.lists(
    st.one_of(st.integers(1, SLOT_BYTES + 64), st.sampled_from([1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1])),
    max_size=40,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=3), st.integers(0, 4))
def test_parts_of_any_size_arrive_through_four_shared_slots(transfers: list[list[int]], num_read_ahead: int) -> None:
    """Slots go round many times; parts that are too large, or find none, go in messages between the others."""
    asyncio.run(_through_four_slots(transfers, num_read_ahead))


async def _through_four_slots(transfers: list[list[int]], num_read_ahead: int) -> None:
    memory, sink = SharedMemorySendPath(SLOT_BYTES, 4 * SLOT_BYTES), CollectingSink()
    segment = memory.segment()
    assert segment is not None
    transport = transport_over(memory, max_inflight_bytes=3 * SLOT_BYTES)
    sent: dict[str, bytes] = {}

    async def send(name: str, part_sizes: list[int]) -> None:
        chance = random.Random(name)
        parts = [chance.randbytes(size) for size in part_sizes]
        sent[name] = b"".join(parts)
        stream = await transport.open(offer(name), peer)
        ahead: deque[bytes | PartBuffer] = deque()
        for part in [*parts, *[b""] * num_read_ahead]:
            buffer = stream.buffer(len(part)) if part else None
            if buffer is not None:
                assert len(part) <= SLOT_BYTES
                buffer.view[:] = part
            ahead.append(part if buffer is None else buffer)
            if len(ahead) > num_read_ahead and len(ahead[0]):
                await stream.send(PartHeader(0, 1, 0, 1), ahead.popleft())
        assert await stream.commit() == len(sent[name])

    async with kv_server(sink, SegmentMappings()) as (_, peer):
        await asyncio.gather(*(send(f"transfer-{number}", parts) for number, parts in enumerate(transfers)))
        await transport.close()
    assert sink.content == sent
    await slots_free(segment)
