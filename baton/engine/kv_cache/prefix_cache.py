"""Finds blocks by content. A block's hash chains its parent's hash with its own tokens, so equal hashes mean equal
prefixes; tokens are compared as well, so that a collision is a miss and never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.prefix_events import PrefixEvents


@dataclass(frozen=True, slots=True)
class _Entry:
    block: int
    parent: bytes | None
    token_ids: tuple[int, ...]


class PrefixCache:
    """Maps content hashes to block ids. Holds no references; the pool reports when a block's content is evicted.

    Attributes:
        events: publishes every block that joins or leaves.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.events = PrefixEvents()
        self._entries: dict[bytes, _Entry] = {}
        self._hash_of_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, chain: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix, in order."""
        blocks: list[int] = []
        for index, block_hash in enumerate(chain):
            entry = self._entries.get(block_hash)
            if entry is None:
                break
            start = index * self.block_size
            parent = chain[index - 1] if index else None
            if entry.parent != parent or entry.token_ids != tuple(token_ids[start : start + self.block_size]):
                break
            blocks.append(entry.block)
        return blocks

    def insert(self, block_hash: bytes, parent: bytes | None, token_ids: Sequence[int], block: int) -> bool:
        """Adds a full block. Returns False when another block with equal content is cached already."""
        if block_hash in self._entries:
            return False
        self._entries[block_hash] = _Entry(block, parent, tuple(token_ids))
        self._hash_of_block[block] = block_hash
        self.events.stored(block_hash)
        return True

    def forget(self, block: int) -> None:
        """Removes a block whose content is about to be overwritten."""
        block_hash = self._hash_of_block.pop(block, None)
        if block_hash is not None:
            del self._entries[block_hash]
            self.events.evicted(block_hash)
