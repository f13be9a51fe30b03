"""Additions to and evictions from a prefix cache, for readers in other threads. No torch.

Every reader first gets a snapshot, then the changes since its last read: a block that came and went between two reads
is not reported. A slow reader's backlog is therefore bounded by the size of the cache, and a backlog longer than a
snapshot is replaced by one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DELIVERY_PAUSE_S = 0.05
_SNAPSHOT_ABOVE = 1024
"""A shorter backlog is never replaced by a snapshot, however small the cache is."""


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Block hashes (``baton.core.block_hashes.hash_blocks``), each once.

    Attributes:
        is_snapshot: ``stored`` is the complete content and replaces everything sent before.
    """

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    is_snapshot: bool = False


class PrefixEvents:
    """Publishes a cache's changes to any number of readers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._content: dict[bytes, None] = {}  # in the order in which blocks came, so that parents precede children
        self._readers: list[PrefixReader] = []

    def stored(self, block_hash: bytes) -> None:
        """Reports that a block joined the cache."""
        with self._lock:
            self._content[block_hash] = None
            asleep = [reader for reader in self._readers if reader._note(block_hash, is_stored=True)]
        for reader in asleep:
            reader._wake()

    def evicted(self, block_hash: bytes) -> None:
        """Reports that a block left the cache."""
        with self._lock:
            del self._content[block_hash]
            asleep = [reader for reader in self._readers if reader._note(block_hash, is_stored=False)]
        for reader in asleep:
            reader._wake()

    @contextmanager
    def reader(self, wake: Callable[[], None]) -> Iterator[PrefixReader]:
        """Registers a new reader for the duration of the ``with`` block.

        Args:
            wake: called in the writer's thread at the first change after each read. It must neither wait nor raise.
        """
        reader = PrefixReader(self._lock, self._content, wake)
        with self._lock:
            self._readers.append(reader)
        try:
            yield reader
        finally:
            with self._lock:
                self._readers.remove(reader)


class PrefixReader:
    """The backlog of one reader."""

    def __init__(self, lock: threading.Lock, content: dict[bytes, None], wake: Callable[[], None]) -> None:
        self._lock = lock
        self._content = content
        self._wake = wake
        self._changes: dict[bytes, bool] = {}  # hash → joined (True) or left; order does not matter
        self._needs_snapshot = True
        self._is_awake = True

    @property
    def num_waiting(self) -> int:
        """Number of changes in the backlog."""
        return len(self._changes)

    def take(self) -> CacheChanges | None:
        """Returns and clears the backlog; ``None`` when it is empty."""
        with self._lock:
            self._is_awake = False
            changes, self._changes = self._changes, {}
            if self._needs_snapshot:
                self._needs_snapshot = False
                return CacheChanges(tuple(self._content), is_snapshot=True)
        if not changes:
            return None
        return CacheChanges(
            tuple(block_hash for block_hash, is_stored in changes.items() if is_stored),
            tuple(block_hash for block_hash, is_stored in changes.items() if not is_stored),
        )

    def _note(self, block_hash: bytes, *, is_stored: bool) -> bool:
        """Records a change; returns whether the reader must be woken. The caller holds the lock."""
        if not self._needs_snapshot:
            changes = self._changes
            if changes.get(block_hash) is (not is_stored):
                del changes[block_hash]
            else:
                changes[block_hash] = is_stored
            if len(changes) > max(_SNAPSHOT_ABOVE, len(self._content)):
                changes.clear()
                self._needs_snapshot = True
        was_awake, self._is_awake = self._is_awake, True
        return not was_awake


async def watch(events: PrefixEvents, pause_s: float = DELIVERY_PAUSE_S) -> AsyncGenerator[CacheChanges]:
    """Yields a snapshot, then changes, collected for ``pause_s`` from the first one. Sleeps while nothing changes."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    with events.reader(wake) as reader:
        while True:
            changed.clear()
            changes = reader.take()
            if changes is not None:
                yield changes
            await changed.wait()
            await asyncio.sleep(pause_s)
