"""Conversions between changes of a prefix cache and ``CacheEvents``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from baton.core.block_hashes import HASH_BYTES
from baton.core.prefix_events import DELIVERY_PAUSE_S, CacheChanges, PrefixEvents, watch
from baton.rpc.wire import worker_pb2

DECODE_PAUSE_S = 0.2
"""Time between two deliveries of a decode worker. Its cache changes with every few tokens, but the changes matter only
when the conversation continues, which takes longer."""
_MAX_BLOCKS = 4096
"""Limit per message, since the router takes a millisecond for that many, in which it relays no tokens."""


def pack_cache_changes(changes: CacheChanges) -> Iterator[worker_pb2.CacheEvents]:
    """Packs changes into messages. Evictions go first, so that a reader never counts more than the cache holds."""
    is_snapshot = changes.is_snapshot
    for part in _parts(changes.evicted):
        yield worker_pb2.CacheEvents(evicted=part)
    for part in _parts(changes.stored):
        yield worker_pb2.CacheEvents(is_snapshot=is_snapshot, stored=part)
        is_snapshot = False  # later parts add to the first one
    if is_snapshot:
        yield worker_pb2.CacheEvents(is_snapshot=True)


def _parts(hashes: Sequence[bytes]) -> Iterator[bytes]:
    for start in range(0, len(hashes), _MAX_BLOCKS):
        yield b"".join(hashes[start : start + _MAX_BLOCKS])


def unpack_hashes(packed: bytes) -> list[bytes]:
    """Splits concatenated hashes. Raises :class:`ValueError` if the last one is incomplete."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a multiple of the {HASH_BYTES} bytes of a hash")
    return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


async def watch_messages(
    events: PrefixEvents, pause_s: float = DELIVERY_PAUSE_S
) -> AsyncGenerator[worker_pb2.CacheEvents]:
    """The stream of ``Worker.WatchCache``: a snapshot, then changes, at most every ``pause_s``."""
    async with aclosing(watch(events, pause_s)) as deliveries:
        async for changes in deliveries:
            for message in pack_cache_changes(changes):
                yield message
