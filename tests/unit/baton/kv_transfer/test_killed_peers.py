"""When a process that shares memory is killed, the other one continues and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.core.errors import TransferError, WorkerLostError
from baton.kv_transfer.base import PartHeader
from baton.kv_transfer.payload.nixl import NixlReader
from baton.kv_transfer.payload.segment import SEGMENT_NAME
from baton.kv_transfer.payload.shared_memory import SegmentMappings, SharedMemorySendPath
from baton.rpc.wire.kv_pb2 import KVSegment, KVSlot
from tests.unit.baton.kv_transfer.kv_peers import CONTENT, PART_BYTES, send_shared
from tests.unit.baton.kv_transfer.links import (
    RecordingSink,
    kv_server,
    num_mappings,
    num_mappings_before,
    slots_free,
    transport_over,
)
from tests.waiting import TIMEOUT_S

REPOSITORY = Path(__file__).parents[4]


@dataclass
class WatchedSink(RecordingSink):
    writing: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, transfer_id: str, header: PartHeader, payload: memoryview, checksum: int) -> None:
        self.writing.set()
        await super().write(transfer_id, header, payload, checksum)


@asynccontextmanager
async def peer_process(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.unit.baton.kv_transfer.kv_peers", *arguments,
        cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line_of(process: Process) -> str:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)
    assert line, "the process ended"
    return line.decode().strip()


async def kill(process: Process) -> None:
    process.send_signal(signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


async def unmapped(before: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while num_mappings() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def named_segments() -> list[str]:
    """What could outlive its processes; there is none even while they live."""
    return [name for name in os.listdir("/dev/shm") if SEGMENT_NAME in name]


async def test_memory_of_a_killed_sender_stays_readable_until_its_last_reader_closes() -> None:
    before, mappings = num_mappings_before(), SegmentMappings(idle_s=0.01)
    async with peer_process("hold") as sender:
        offer, slot = (bytes.fromhex(word) for word in (await line_of(sender)).split())
        segment = mappings.attach(KVSegment.FromString(offer))
        assert segment is not None
        assert named_segments() == []
        await kill(sender)
    assert bytes(segment.read(KVSlot.FromString(slot))) == CONTENT
    assert mappings.attach(KVSegment.FromString(offer)) is segment
    for _ in range(2):
        mappings.detach(segment)
    del segment
    await unmapped(before)
    assert mappings.attach(KVSegment.FromString(offer)) is None, "it is gone for good"


@pytest.mark.nixl
async def test_reading_the_memory_of_a_killed_sender_is_an_error() -> None:
    reader = NixlReader(timeout_s=5.0, connect_timeout_s=5.0)
    async with peer_process("export") as sender:
        offer, slot = (bytes.fromhex(word) for word in (await line_of(sender)).split())
        async with reader.attached(KVSegment.FromString(offer)) as memory:
            assert memory is not None
            assert bytes(await memory.fetch(KVSlot.FromString(slot))) == CONTENT
            await kill(sender)
            with pytest.raises(TransferError):
                async with asyncio.timeout(TIMEOUT_S):
                    await memory.fetch(KVSlot.FromString(slot))
        for _ in range(2):
            async with reader.attached(KVSegment.FromString(offer)) as memory:
                assert memory is None
            reader._avoided.clear()  # as a minute later
    async with peer_process("export") as sender:
        offer, slot = (bytes.fromhex(word) for word in (await line_of(sender)).split())
        async with reader.attached(KVSegment.FromString(offer)) as memory:
            assert memory is not None
            assert bytes(await memory.fetch(KVSlot.FromString(slot))) == CONTENT
    await reader.close()


async def test_killing_a_sender_aborts_the_transfer_and_frees_its_memory() -> None:
    before, mappings = num_mappings_before(), SegmentMappings(idle_s=0.01)
    sink = WatchedSink()
    async with kv_server(sink, mappings) as (_, peer), peer_process("send", peer) as sender:
        await asyncio.wait_for(sink.writing.wait(), TIMEOUT_S)
        assert (len(mappings), num_mappings(), named_segments()) == (1, before + 1, [])
        await kill(sender)
        async with asyncio.timeout(TIMEOUT_S):
            while not sink.aborts:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert sink.aborts == ["the sender disconnected"]
        await unmapped(before)
        assert (len(mappings), named_segments()) == (0, [])

        sink.gate.set()
        again = transport_over(SharedMemorySendPath(PART_BYTES))
        assert await send_shared(again, peer, "afterwards", 3) == sink.num_bytes == 3 * PART_BYTES
        await again.close()


async def test_killing_a_receiver_ends_the_transfer_and_frees_its_slots() -> None:
    memory = SharedMemorySendPath(PART_BYTES)
    segment = memory.segment()
    assert segment is not None
    transport = transport_over(memory, max_inflight_bytes=4 * PART_BYTES)
    async with peer_process("receive") as receiver:
        sending = asyncio.create_task(send_shared(transport, await line_of(receiver), "killed", 100))
        assert await line_of(receiver) == "writing"
        async with asyncio.timeout(TIMEOUT_S):
            while segment.layout.num_slots - segment.num_free_slots < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # four on their way, and one that waits
        await kill(receiver)
        with pytest.raises(WorkerLostError):
            await sending
    await slots_free(segment)
    assert named_segments() == []

    sink = RecordingSink()
    sink.gate.set()
    async with kv_server(sink, SegmentMappings()) as (_, peer):
        assert await send_shared(transport, peer, "afterwards", 20) == sink.num_bytes == 20 * PART_BYTES
    await transport.close()
