"""Checksums of KV payloads (xxh3-64), and copies that take the checksum on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from baton.kv_transfer.base import Payload, Pieces

CHUNK_BYTES = 128 * 1024
"""Copied at once: it stays in the second level of a core's caches, and calls cost little beside it."""


def checksum(payload: Payload | Pieces) -> int:
    """xxh3-64 of the payload."""
    if not isinstance(payload, Pieces):
        return xxhash.xxh3_64_intdigest(payload)
    digest = xxhash.xxh3_64()
    for view in payload.views:
        digest.update(view)
    return digest.intdigest()


def copy_summed(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> int:
    """Copies bytes between stretches of memory, however either side is cut, and sums what it has written.

    Returns:
        The xxh3-64 of what is in ``targets`` then, even if others write into ``sources`` meanwhile.

    Raises:
        ValueError: sources and targets differ in length.
    """
    num_bytes, room = sum(map(len, sources)), sum(map(len, targets))
    if num_bytes != room:
        raise ValueError(f"{num_bytes} bytes are to be copied to where there is room for {room}")
    digest = xxhash.xxh3_64()
    for source, target in _pairs(sources, targets):
        target[:] = source
        digest.update(target)
    return digest.intdigest()


def _pairs(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Chunks that neither side cuts."""
    left = iter(targets)
    target, used = memoryview(b""), 0
    for source in sources:
        done = 0
        while done < len(source):
            if used == len(target):
                target, used = next(left), 0
                continue
            size = min(CHUNK_BYTES, len(source) - done, len(target) - used)
            yield source[done : done + size], target[used : used + size]
            done += size
            used += size
