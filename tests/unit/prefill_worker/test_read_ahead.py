"""Read-ahead runs in order and within its limit while parts are sent, and stops when the transfer ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing

import pytest
import torch

from baton.core.kv_spec import KVCacheSpec, KVEncoding, LayerSpec
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.kv_transfer.base import PartHeader, Payload, Pieces
from prefill_worker.read_ahead import PARTS_AT_ONCE, ReadPart, read_ahead, read_parts
from tests.waiting import TIMEOUT_S

BLOCKS = (4, 2)
HEADERS = [PartHeader(token, 1, 0, 2, KVEncoding.INT8) for token in range(3 * PARTS_AT_ONCE)]


class FakeCache:
    """Gives a part's position as its bytes.

    Attributes:
        reads: positions, in order.
        gate: closed, no read ends.
    """

    def __init__(self, broken_at: int | None = None) -> None:
        self.reads: list[int] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self._broken_at = broken_at

    def export_bytes(
        self,
        block_ids: Sequence[int],
        start: int,
        end: int,
        layers: range,
        into: memoryview | None,
        encoding: KVEncoding,
        after: object,
    ) -> memoryview:
        if start == self._broken_at:
            raise ValueError(f"position {start} cannot be read")
        assert (block_ids, end, layers, encoding) == (BLOCKS, start + 1, range(2), KVEncoding.INT8)
        self.reads.append(start)
        self.threads.add(threading.get_ident())
        assert self.gate.wait(30)
        if into is None:
            return memoryview(bytes([start]))
        into[:] = bytes([start])
        return into


class FakeBuffer:
    """``held``: neither sent nor released."""

    def __init__(self, num_bytes: int = 1) -> None:
        self.view = memoryview(bytearray(num_bytes))
        self.checksum: int | None = None
        self.held = True

    def __len__(self) -> int:
        return len(self.view)

    def fill(self, views: Sequence[memoryview]) -> None:
        self.view[:] = b"".join(views)
        self.checksum = 1

    def release(self) -> None:
        self.held = False


class FakeStream:
    """Has a buffer for two parts out of three."""

    def __init__(self) -> None:
        self.buffers: list[FakeBuffer] = []

    def buffer_for(self, header: PartHeader) -> FakeBuffer | None:
        if header.token_start % 3 == 2:
            return None
        self.buffers.append(FakeBuffer())
        return self.buffers[-1]

    @property
    def num_held(self) -> int:
        return sum(buffer.held for buffer in self.buffers)

    async def all_released(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_held:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def all_read(count: int, cache: FakeCache) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while len(cache.reads) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("count", [0, 1, 2, PARTS_AT_ONCE + 1, len(HEADERS)])
async def test_every_part_is_read_once_and_in_order(count: int) -> None:
    cache = FakeCache()
    parts = [part async for part in read_ahead(cache, BLOCKS, iter(HEADERS[:count]))]
    assert [part.header for part in parts] == HEADERS[:count]
    assert [bytes(part.payload) for part in parts] == [bytes([token]) for token in range(count)]
    assert [part.started_s for part in parts] == sorted(part.started_s for part in parts)
    assert threading.get_ident() not in cache.threads


async def test_the_next_parts_are_read_ahead_up_to_the_limit() -> None:
    cache = FakeCache()
    async with aclosing(read_ahead(cache, BLOCKS, iter(HEADERS))) as parts:
        first = await anext(parts)
        assert first.header == HEADERS[0]
        await all_read(1 + PARTS_AT_ONCE, cache)  # no other part was requested
        await asyncio.sleep(0.02)
        assert cache.reads == list(range(1 + PARTS_AT_ONCE))


async def test_an_unreadable_part_is_reported_after_the_readable_ones() -> None:
    parts = read_ahead(FakeCache(broken_at=2), BLOCKS, iter(HEADERS))
    assert (await anext(parts)).header == HEADERS[0]
    with pytest.raises(ValueError, match="position 2"):
        await anext(parts)


async def test_closing_early_stops_reading() -> None:
    cache = FakeCache()
    async with aclosing(read_ahead(cache, BLOCKS, iter(HEADERS))) as parts:
        await anext(parts)
    await asyncio.sleep(0.02)
    assert len(cache.reads) <= 1 + PARTS_AT_ONCE
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


def content(part: ReadPart) -> bytes:
    payload = part.payload
    return bytes(payload if isinstance(payload, Payload) else payload.view)


async def test_parts_are_read_into_the_available_buffers() -> None:
    stream = FakeStream()
    parts = [part async for part in read_ahead(FakeCache(), BLOCKS, iter(HEADERS), stream.buffer_for)]
    assert [content(part) for part in parts] == [bytes([token]) for token in range(len(HEADERS))]
    assert [part.is_shared for part in parts] == [token % 3 != 2 for token in range(len(HEADERS))]
    assert stream.num_held == len(stream.buffers), "they belong to whoever got the parts"


@pytest.mark.parametrize("num_taken", [1, 2, 5])
async def test_buffers_of_unused_parts_are_freed(num_taken: int) -> None:
    stream, cache = FakeStream(), FakeCache()
    async with aclosing(read_ahead(cache, BLOCKS, iter(HEADERS), stream.buffer_for)) as parts:
        for _ in range(num_taken):
            part = await anext(parts)
            part.forget()
    await stream.all_released()


async def test_a_buffer_is_not_freed_while_a_thread_can_write_to_it() -> None:
    stream, cache = FakeStream(), FakeCache()
    parts = read_ahead(cache, BLOCKS, iter(HEADERS), stream.buffer_for)
    (await anext(parts)).forget()
    cache.gate.clear()
    waiting = asyncio.create_task(anext(parts))
    await all_read(2, cache)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await parts.aclose()
    await asyncio.sleep(0.02)
    assert stream.num_held > 0
    cache.gate.set()
    await stream.all_released()


async def test_a_failed_read_frees_every_buffer() -> None:
    stream = FakeStream()
    parts = read_ahead(FakeCache(broken_at=4), BLOCKS, iter(HEADERS), stream.buffer_for)
    (await anext(parts)).forget()
    with pytest.raises(ValueError, match="position 4"):
        await anext(parts)
    await stream.all_released()


async def test_model_layers_are_read_in_place_and_draft_layers_are_copied() -> None:
    """A draft writes at the last position of a prompt that is on its way already."""
    layer = LayerSpec(1, 4, 4)
    spec = KVCacheSpec("model", "float32", 4, (layer, layer), draft_fingerprint="draft", draft_layers=(layer,))
    cache = PagedKVCache(spec, 4, torch.device("cpu"))
    headers = [PartHeader(0, 3, 0, 1), PartHeader(0, 3, 1, 2), PartHeader(0, 3, 2, 3)]
    async with aclosing(read_parts(cache, (1,), iter(headers))) as parts:
        kinds = [(part.header, isinstance(part.payload, Pieces)) async for part in parts]
    assert kinds == list(zip(headers, (True, True, False), strict=True))
    async with aclosing(read_parts(cache, (1,), iter([PartHeader(0, 3, 1, 3)]))) as parts:
        assert [isinstance(part.payload, Pieces) async for part in parts] == [False]


async def test_a_part_readable_in_place_is_copied_into_its_buffer() -> None:
    layer = LayerSpec(1, 4, 4)
    spec = KVCacheSpec("model", "float32", 4, (layer, layer))
    cache = PagedKVCache(spec, 4, torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.uniform_()
    headers = [PartHeader(1, 6, 0, 2), PartHeader(1, 6, 0, 2, KVEncoding.INT8)]
    buffers: dict[PartHeader, FakeBuffer] = {}

    def buffer_for(header: PartHeader) -> FakeBuffer:
        return buffers.setdefault(header, FakeBuffer(header.num_bytes(spec)))

    async with aclosing(read_parts(cache, (3, 1), iter(headers), buffer_for)) as parts:
        assert [part.header async for part in parts if part.is_shared] == headers
    for header, buffer in buffers.items():
        assert buffer.view == cache.export_bytes((3, 1), 1, 7, range(2), encoding=header.encoding)
    assert [buffers[header].checksum for header in headers] == [1, None], "int8 is made, not copied"
