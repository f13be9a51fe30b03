"""Reads parts out of the KV cache while earlier ones are being sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain, islice

from baton.core.kv_spec import KVEncoding
from baton.engine.kv_cache.kv_copies import WorkMark
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.kv_transfer.base import PartBuffer, PartHeader, Payload, Pieces

PARTS_AT_ONCE = 4
"""Parts per batch. A batch costs two thread switches, which take as long as reading a part of one megabyte."""


@dataclass(frozen=True, slots=True)
class ReadPart:
    """A part that has been read. ``started_s`` is when reading began, on the monotonic clock."""

    header: PartHeader
    payload: Payload | Pieces | PartBuffer
    started_s: float

    @property
    def is_shared(self) -> bool:
        """Whether the part is in a buffer of the transport from which the receiver reads."""
        return not isinstance(self.payload, Payload | Pieces)

    def forget(self) -> None:
        """Releases the memory of a part that will not be sent."""
        if not isinstance(self.payload, Payload | Pieces):
            self.payload.release()


def no_buffer(header: PartHeader) -> None:
    """Stands in for ``buffer_for`` when parts are read into memory of their own."""
    return


async def read_parts(
    cache: PagedKVCache,
    block_ids: Sequence[int],
    headers: Iterator[PartHeader],
    buffer_for: Callable[[PartHeader], PartBuffer | None] | None = None,
    ready: WorkMark | None = None,
) -> AsyncGenerator[ReadPart]:
    """Yields the parts in order: views of the cache where parts can be sent from there, else :func:`read_ahead`'s.

    A draft's layers are always copied, because the draft writes at a prompt's last position when the prompt is done,
    and the checksum must match the bytes that are sent.

    Args:
        buffer_for: returns the memory to read a part into, or ``None``. Without it, parts are sent from the cache.
        ready: marks the step that computes the positions; see
            :meth:`baton.engine.kv_cache.paged_cache.PagedKVCache.export_bytes`.
    """
    if buffer_for is not None:
        async with aclosing(read_ahead(cache, block_ids, headers, buffer_for, ready)) as parts:
            async for part in parts:
                yield part
        return
    for header in headers:
        started_s = time.monotonic()
        views = _pieces(cache, block_ids, header) if header.layer_end <= len(cache.spec.layers) else None
        if views is None:
            async with aclosing(read_ahead(cache, block_ids, chain([header], headers), ready=ready)) as parts:
                async for part in parts:
                    yield part
            return
        yield ReadPart(header, Pieces(tuple(views), header.num_bytes(cache.spec)), started_s)


async def read_ahead(
    cache: PagedKVCache,
    block_ids: Sequence[int],
    headers: Iterator[PartHeader],
    buffer_for: Callable[[PartHeader], PartBuffer | None] = no_buffer,
    ready: WorkMark | None = None,
) -> AsyncGenerator[ReadPart]:
    """Yields the parts in order. At most twice :data:`PARTS_AT_ONCE` parts are in memory.

    Another thread reads them, so that reading does not delay the first tokens of other requests.

    Args:
        buffer_for: returns the memory to read a part into, or ``None``. The memory of parts that are not consumed is
            released once the thread has stopped writing to it.
        ready: see :func:`read_parts`.
    """
    loop = asyncio.get_running_loop()

    def read(batch: list[tuple[PartHeader, PartBuffer | None]]) -> list[ReadPart]:
        return [_read(cache, block_ids, header, buffer, ready) for header, buffer in batch]

    def begin(size: int) -> _Reading | None:
        batch = [(header, buffer_for(header)) for header in islice(headers, size)]
        if not batch:
            return None
        return _Reading(loop.run_in_executor(None, read, batch), [buffer for _, buffer in batch if buffer is not None])

    reading = begin(1)  # a batch of one, so that the first part does not wait for others
    parts: list[ReadPart] = []
    try:
        while reading is not None:
            parts = (await asyncio.shield(reading.parts))[::-1]
            reading = begin(PARTS_AT_ONCE)
            while parts:
                yield parts.pop()
    finally:
        for part in parts:
            part.forget()
        if reading is not None:
            reading.abandon()


@dataclass(frozen=True, slots=True)
class _Reading:
    """A batch that a thread reads, and the buffers that it may be writing to."""

    parts: asyncio.Future[list[ReadPart]]
    buffers: list[PartBuffer]

    def abandon(self) -> None:
        self.parts.add_done_callback(self._release)  # the thread cannot be stopped

    def _release(self, parts: asyncio.Future[list[ReadPart]]) -> None:
        if not parts.cancelled():
            parts.exception()  # marks it as retrieved
        for buffer in self.buffers:
            buffer.release()


def _read(
    cache: PagedKVCache, block_ids: Sequence[int], header: PartHeader, buffer: PartBuffer | None, ready: WorkMark | None
) -> ReadPart:
    started_s = time.monotonic()
    if buffer is not None and (views := _pieces(cache, block_ids, header)) is not None:
        buffer.fill(views)
        return ReadPart(header, buffer, started_s)
    span, into = (header.token_start, header.token_end, header.layers), None if buffer is None else buffer.view
    payload = cache.export_bytes(block_ids, *span, into, header.encoding, ready)
    return ReadPart(header, payload if buffer is None else buffer, started_s)


def _pieces(cache: PagedKVCache, block_ids: Sequence[int], header: PartHeader) -> list[memoryview] | None:
    """Views of a part in the cache; ``None`` when the cache does not hold the bytes in the form that is sent."""
    if header.encoding is not KVEncoding.NATIVE:
        return None
    return cache.pieces(block_ids, header.token_start, header.token_end, header.layers)
