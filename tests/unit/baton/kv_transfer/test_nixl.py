"""Memory of a sender that is read by NIXL: what the suites for any transport do not reach."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from baton.core.errors import ConfigError, TransferError
from baton.kv_transfer.kv_transfer_config import KVTransferConfig
from baton.kv_transfer.payload import nixl, nixl_agent
from baton.kv_transfer.payload.nixl import NixlReader, NixlSendPath
from baton.kv_transfer.payload.nixl_agent import NixlAgent, ReadState
from baton.kv_transfer.payload.segment import SharedSegment
from baton.kv_transfer.payload.shared_memory import SegmentMappings
from baton.kv_transfer.transports import create_kv_service, create_transport
from baton.rpc.wire.kv_pb2 import KVNixl, KVSegment, KVSlot
from tests.credentials import CREDENTIALS
from tests.kv_receiver import Receiver, SourceKV
from tests.unit.baton.kv_transfer.links import RecordingSink, kv_server, send_all, transport_over
from tests.unit.baton.kv_transfer.slow_agent import SlowAgent
from tests.waiting import TIMEOUT_S

pytestmark = pytest.mark.nixl
PART_BYTES = 1 << 16
CONTENT = bytes(range(256)) * (PART_BYTES // 256)


@asynccontextmanager
async def reading(timeout_s: float = 20.0, connect_timeout_s: float = 20.0) -> AsyncIterator[NixlReader]:
    reader = NixlReader(timeout_s, connect_timeout_s)
    yield reader
    await reader.close()


@pytest.fixture
def memory() -> Iterator[NixlSendPath]:
    made = NixlSendPath(PART_BYTES, 4 * PART_BYTES)
    yield made
    made.close()


@pytest.fixture
def segment(memory: NixlSendPath) -> SharedSegment:
    made = memory.segment()
    assert made is not None
    return made


def filled(segment: SharedSegment, content: bytes = CONTENT) -> KVSlot:
    slot = segment.take(len(content))
    assert slot is not None
    slot.view[:] = content
    return slot.reference


async def test_a_reused_slot_is_read_again(segment: SharedSegment) -> None:
    async with reading() as reader, reader.attached(segment.offer) as found:
        assert found is not None
        for number in range(3):
            slot = segment.take(100 + number)
            assert slot is not None
            slot.view[:] = bytes([number]) * (100 + number)
            assert bytes(await found.fetch(slot.reference)) == bytes([number]) * (100 + number)
            slot.release()


@pytest.mark.parametrize(("index", "num_bytes"), [(4, 1), (0, 0), (0, PART_BYTES + 1), (2**31, 1)])
async def test_only_slots_are_read(segment: SharedSegment, index: int, num_bytes: int) -> None:
    async with reading() as reader, reader.attached(segment.offer) as found:
        assert found is not None
        with pytest.raises(TransferError, match="there are 4 slots"):
            await found.fetch(KVSlot(index=index, generation=1, num_bytes=num_bytes))


def without_agent(offer: KVSegment) -> KVSegment:
    offer.nixl.agent = b"no description of an agent"
    return offer


def with_another_token(offer: KVSegment) -> KVSegment:
    offer.token = bytes(16)
    return offer


def at_another_address(offer: KVSegment) -> KVSegment:
    offer.nixl.address += 4096 * 1024
    return offer


def without_slots(offer: KVSegment) -> KVSegment:
    offer.num_slots = 0
    return offer


@pytest.mark.parametrize("change", [without_agent, with_another_token, at_another_address, without_slots])
async def test_mismatching_memory_is_avoided_for_a_while(
    segment: SharedSegment,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[KVSegment], KVSegment],
) -> None:
    offer = change(segment.offer)
    async with reading(connect_timeout_s=1.0) as reader:
        for _ in range(2):
            async with reader.attached(offer) as found:
                assert found is None
        assert len(caplog.records) == 1
        monkeypatch.setattr(nixl, "RETRY_S", 0.0)
        reader._avoided.clear()
        async with reader.attached(segment.offer) as found:
            assert found is not None


async def test_parts_travel_in_messages_if_the_memory_cannot_be_read(
    receiver: Receiver, memory: NixlSendPath, segment: SharedSegment
) -> None:
    source = SourceKV(receiver.spec, (1, 2, 3, 4, 5))
    segment.nixl = KVNixl(agent=b"nonsense", address=1)
    async with reading() as reader, kv_server(receiver.importer, None, nixl=reader) as (_, peer):
        transport = transport_over(memory)
        stream = await transport.open(source.offer(), peer)
        assert stream.buffer(100) is None
        await send_all(stream, source)
        await transport.close()
    receiver.importer.release(await receiver.importer.claim(source.offer().transfer_id))
    await receiver.all_given_back()


async def test_memory_on_the_same_host_is_mapped_and_not_read(receiver: Receiver, memory: NixlSendPath) -> None:
    source = SourceKV(receiver.spec, (1, 2, 3, 4, 5))
    async with reading() as reader, kv_server(receiver.importer, SegmentMappings(), nixl=reader) as (_, peer):
        transport = transport_over(memory)
        stream = await transport.open(source.offer(), peer)
        assert stream.buffer(100) is not None
        assert reader._senders == {}
        await stream.abort()
        await transport.close()


async def test_memory_that_cannot_be_registered_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(agent: NixlAgent, memory: memoryview) -> None:
        raise RuntimeError("too much locked memory")

    monkeypatch.setattr(NixlAgent, "register", refuse)
    memory = NixlSendPath(PART_BYTES)
    segment = memory.segment()
    assert segment is not None
    assert not segment.offer.HasField("nixl")
    assert "too much locked memory" in caplog.text
    memory.close()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> SlowAgent:
    made = SlowAgent()
    monkeypatch.setattr(nixl, "NixlAgent", lambda serves: made)
    return made


@pytest.mark.parametrize(
    ("state", "reason", "is_used_again"),
    [(ReadState.UNDER_WAY, "no data arrived for 0.05 s", False), (ReadState.FAILED, "the read failed", True)],
)
async def test_a_failed_read_is_an_error_and_the_sender_is_avoided(
    segment: SharedSegment, agent: SlowAgent, state: ReadState, reason: str, is_used_again: bool
) -> None:
    """Memory that may still be written to is used for nothing else."""
    async with reading(timeout_s=0.05) as reader:
        async with reader.attached(segment.offer) as found:
            assert found is not None
            agent.as_if = state
            with pytest.raises(TransferError, match=reason):
                await found.fetch(filled(segment))
        assert bool(reader._free[segment.layout.slot_bytes]) == is_used_again
        agent.as_if = None
        async with reader.attached(segment.offer) as found:
            assert found is None


async def test_a_sender_that_is_no_longer_avoided_is_connected_anew(
    segment: SharedSegment, agent: SlowAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What connected the two does not heal."""
    monkeypatch.setattr(nixl, "RETRY_S", 0.0)
    async with reading() as reader:
        async with reader.attached(segment.offer) as first, reader.attached(segment.offer) as second:
            assert first is not None
            assert second is not None
            agent.as_if = ReadState.FAILED
            with pytest.raises(TransferError):
                await first.fetch(filled(segment))
            agent.as_if = None
            assert bytes(await second.fetch(filled(segment))) == CONTENT, "others go on"
            assert agent.num_forgotten == 0
        async with reader.attached(segment.offer) as found:
            assert found is not None
            assert bytes(await found.fetch(filled(segment))) == CONTENT
    assert (len(agent.met), agent.num_forgotten) == (2, 1)


async def test_without_memory_to_read_into_parts_travel_in_messages(
    segment: SharedSegment, agent: SlowAgent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.most_bytes = mmap.PAGESIZE
    async with reading() as reader, reader.attached(segment.offer) as found:
        assert found is None
    assert "too much locked memory" in caplog.text


async def test_no_exception_of_nixl_ends_the_thread(segment: SharedSegment, agent: SlowAgent) -> None:
    agent.can_release = False
    async with reading() as reader, reader.attached(segment.offer) as found:
        assert found is not None
        for _ in range(2):
            assert bytes(await found.fetch(filled(segment))) == CONTENT


async def test_cancelling_during_registration_leaves_the_memory_to_the_next_transfer(
    segment: SharedSegment, agent: SlowAgent
) -> None:
    async with reading() as reader:
        making = asyncio.ensure_future(reader._take_buffer(PART_BYTES))
        await asyncio.sleep(0)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        async with asyncio.timeout(TIMEOUT_S):
            while not reader._free[PART_BYTES]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        async with reader.attached(segment.offer):
            assert len(reader._buffers) == 2
    assert agent.num_registered == 0


async def test_a_receiver_with_another_page_size_finds_the_slots(segment: SharedSegment) -> None:
    offer = segment.offer
    assert offer.nixl.slots_address - offer.nixl.address == segment.layout.slot_start(0)
    filled(segment)
    offer.nixl.slots_address += 1000
    async with reading() as reader, reader.attached(offer) as found:
        assert found is not None
        slot = KVSlot(index=3, generation=1, num_bytes=100)
        assert bytes(await found.fetch(slot)) == CONTENT[1000 % 256 :][:100]


async def test_cancelling_during_a_read_keeps_its_memory_until_the_read_ends(
    segment: SharedSegment, agent: SlowAgent
) -> None:
    slot_bytes = segment.layout.slot_bytes
    async with reading() as reader:
        async with reader.attached(segment.offer) as found:
            assert found is not None
            agent.as_if = ReadState.UNDER_WAY
            running = asyncio.ensure_future(found.fetch(filled(segment)))
            await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert reader._free[slot_bytes] == []
        agent.as_if = None
        async with asyncio.timeout(TIMEOUT_S):
            while not reader._free[slot_bytes]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_one_unresponsive_sender_blocks_no_other(segment: SharedSegment, agent: SlowAgent) -> None:
    async with reading() as reader, reader.attached(segment.offer) as one, reader.attached(segment.offer) as other:
        assert one is not None
        assert other is not None
        agent.sticks = True
        waiting = asyncio.ensure_future(one.fetch(filled(segment)))
        while not agent.stuck:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert bytes(await other.fetch(filled(segment))) == CONTENT
        assert not waiting.done()
        agent.stuck.clear()
        assert bytes(await waiting) == CONTENT


async def test_transfers_of_one_sender_share_the_connection_setup(segment: SharedSegment, agent: SlowAgent) -> None:
    async def use(reader: NixlReader) -> None:
        async with reader.attached(segment.offer) as found:
            assert found is not None
            assert bytes(await found.fetch(filled(segment))) == CONTENT

    async with reading() as reader:
        await asyncio.gather(*(use(reader) for _ in range(4)))
    assert len(agent.met) == 1


async def test_the_thread_does_not_poll_without_reads(segment: SharedSegment, agent: SlowAgent) -> None:
    async with reading() as reader:
        async with reader.attached(segment.offer) as found:
            assert found is not None
            await found.fetch(filled(segment))
        num_looks = agent.num_looks
        await asyncio.sleep(0.05)
        assert agent.num_looks == num_looks


async def test_closing_a_reader_ends_its_reads(segment: SharedSegment, agent: SlowAgent) -> None:
    async with reading() as reader, reader.attached(segment.offer) as found:
        assert found is not None
        agent.as_if = ReadState.UNDER_WAY
        running = asyncio.ensure_future(found.fetch(filled(segment)))
        await asyncio.sleep(0.01)
        await reader.close()
        with pytest.raises(TransferError, match="the worker is stopping"):
            await running


async def test_idle_senders_are_forgotten(segment: SharedSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading() as reader:
        async with reader.attached(segment.offer):
            monkeypatch.setattr(nixl, "IDLE_S", 0.0)
            reader._forget_idle()
            assert len(reader._senders) == 1, "one that is in use stays"
        time.sleep(0.001)  # noqa: ASYNC251
        reader._forget_idle()
        assert reader._senders == {}
        async with reader.attached(segment.offer) as found:
            assert found is not None
            assert bytes(await found.fetch(filled(segment))) == CONTENT


def test_without_nixl_the_error_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("nixl_of_nowhere",))
    config = KVTransferConfig(transport="nixl")
    for make in (
        lambda: create_transport(config, CREDENTIALS),
        lambda: create_kv_service(config, CREDENTIALS, RecordingSink()),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[nixl\]'"):
            make()
