"""Which worker holds how much of a prompt, according to the events of the workers' prefix caches.

One dictionary for all workers, hash → bit mask, so that a prompt costs one look-up per block for any number of workers.
Hashes are chained, so a worker holds a prompt up to the first hash that it lacks. A prompt's hashes are computed once,
however often they are asked for.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from baton.core.block_hashes import hash_blocks
from baton.rpc.cache_messages import unpack_hashes
from baton.rpc.wire import worker_pb2

_KEPT_TOKENS = 262_144


@dataclass(frozen=True, slots=True)
class PromptHashes:
    """
    Attributes:
        blocks: hashes of the prompt's full blocks, first to last.
        num_usable: blocks that a cache may provide. At least one token is computed, because its logits are needed.
    """

    block_size: int
    blocks: tuple[bytes, ...]
    num_usable: int


def prompt_hashes(prompt_token_ids: Sequence[int], block_size: int) -> PromptHashes:
    """0.6 µs a block."""
    num_tokens = len(prompt_token_ids)
    blocks = hash_blocks(prompt_token_ids, block_size, num_tokens // block_size)
    return PromptHashes(block_size, tuple(blocks), max(0, num_tokens - 1) // block_size)


class PromptHasher:
    """:func:`prompt_hashes`, and a memory of the newest prompts. These are known by identity and must not change."""

    def __init__(self, block_size: int, kept_tokens: int = _KEPT_TOKENS) -> None:
        self.block_size = block_size
        self._kept_tokens = kept_tokens
        self._num_tokens = 0
        self._newest: OrderedDict[int, tuple[Sequence[int], PromptHashes]] = OrderedDict()  # holds on to what it names

    def hash(self, prompt_token_ids: Sequence[int]) -> PromptHashes:
        key = id(prompt_token_ids)
        kept = self._newest.get(key)
        if kept is not None:
            self._newest.move_to_end(key)
            return kept[1]
        hashes = prompt_hashes(prompt_token_ids, self.block_size)
        self._newest[key] = (prompt_token_ids, hashes)
        self._num_tokens += len(prompt_token_ids)
        while self._num_tokens > self._kept_tokens and len(self._newest) > 1:
            _, (oldest, _) = self._newest.popitem(last=False)
            self._num_tokens -= len(oldest)
        return hashes


_SWEEP_BLOCKS = 4096
"""Removed at a time from what is void; some milliseconds at most."""


_Expectation = tuple[str, float]
"""Worker, and until when. All blocks of a prompt share one object, since there may be many."""


@dataclass(slots=True)
class _Cache:
    """A worker's, as far as it is known. ``mask`` has one bit set, the worker's."""

    mask: int
    hashes: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """Not for several threads, but for :meth:`sizes`.

    Args:
        block_size: tokens a block, in the caches of all workers.
        clock: monotonic seconds.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.block_size = block_size
        self._clock = clock
        self._hasher = PromptHasher(block_size)
        self._holders: dict[bytes, int] = {}
        self._caches: dict[str, _Cache] = {}
        self._void: list[_Cache] = []  # nobody asks about their bits; they are given back when all is swept out
        self._num_masks = 0
        self._free_masks: list[int] = []
        self._expected: dict[bytes, tuple[_Expectation, ...]] = {}  # at most one of each worker
        self._expiries: list[tuple[float, str, Sequence[bytes]]] = []

    def apply(self, worker_id: str, events: worker_pb2.CacheEvents) -> None:
        """Takes what a worker says.

        Raises:
            ValueError: this is no message of hashes; nothing was taken.
        """
        stored, evicted = unpack_hashes(events.stored), unpack_hashes(events.evicted)
        if events.is_snapshot:
            self._make_void(worker_id)
        cache = self._caches.get(worker_id)
        if cache is None:
            cache = self._caches[worker_id] = _Cache(self._take_mask())
        holders, mask = self._holders, cache.mask
        for block_hash in stored:
            holders[block_hash] = holders.get(block_hash, 0) | mask
        cache.hashes.update(stored)
        self._drop(evicted, mask)
        cache.hashes.difference_update(evicted)
        if self._expected:
            self._withdraw(stored, worker_id)  # from here on its word counts
        self._sweep()

    def remove(self, worker_id: str) -> None:
        """Forgets a worker; one that is unknown is fine."""
        self._make_void(worker_id)
        self._withdraw(tuple(self._expected), worker_id)
        self._expiries = [expiry for expiry in self._expiries if expiry[1] != worker_id]
        heapq.heapify(self._expiries)

    def expect(self, worker_id: str, prompt: PromptHashes | Sequence[int], until_s: float) -> None:
        """A prompt is on its way to a worker: until its blocks are stored they count as if they were.

        So a burst of prompts with one beginning stays together, though the first of them is not computed yet.

        Args:
            until_s: when to stop believing it, on the clock; the request may fail.
        """
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            over_s, name, blocks = heapq.heappop(self._expiries)
            self._withdraw(blocks, name, over_s)
        cache = self._caches.get(worker_id)
        if cache is None:
            return  # nothing is known of it, so nothing would ever take its place
        coming = [block_hash for block_hash in self.hashes(prompt).blocks if block_hash not in cache.hashes]
        expectation = (worker_id, until_s)
        alone = (expectation,)
        for block_hash in coming:
            others = self._expected.get(block_hash)
            self._expected[block_hash] = alone if others is None else _merge(others, expectation)
        if coming:
            heapq.heappush(self._expiries, (until_s, worker_id, coming))

    def cached_tokens(self, worker_ids: Iterable[str], prompt: PromptHashes | Sequence[int]) -> dict[str, int]:
        """Leading tokens of a prompt that each worker holds, or will soon (:meth:`expect`); 0 for one that is unknown.

        Args:
            prompt: its token ids, in an object that does not change, or their hashes.
        """
        tokens = dict.fromkeys(worker_ids, 0)
        worker_of = {cache.mask: name for name in tokens if (cache := self._caches.get(name)) is not None}
        left = sum(worker_of)
        if not left:
            return tokens
        hashes = self.hashes(prompt)
        get_holders, look_ahead = self._holders.get, bool(self._expected)
        now_s = self._clock() if look_ahead else 0.0
        for depth, block_hash in enumerate(hashes.blocks[: hashes.num_usable]):
            lost = left & ~get_holders(block_hash, 0)
            if lost and look_ahead:
                lost &= ~self._coming(block_hash, now_s)
            if lost:
                left ^= lost
                _set(tokens, worker_of, lost, depth * self.block_size)
                if not left:
                    return tokens
        _set(tokens, worker_of, left, hashes.num_usable * self.block_size)
        return tokens

    def hashes(self, prompt: PromptHashes | Sequence[int]) -> PromptHashes:
        """Of a prompt; taken from memory when it was asked about just now.

        Raises:
            ValueError: it was hashed in blocks of another size.
        """
        if not isinstance(prompt, PromptHashes):
            return self._hasher.hash(prompt)
        if prompt.block_size != self.block_size:
            raise ValueError(f"a prompt hashed in blocks of {prompt.block_size} where blocks have {self.block_size}")
        return prompt

    def num_blocks(self, worker_id: str) -> int:
        """Blocks known to be in a worker's cache."""
        cache = self._caches.get(worker_id)
        return len(cache.hashes) if cache is not None else 0

    def sizes(self) -> dict[str, int]:
        """:meth:`num_blocks` by worker. Any thread may ask."""
        return {worker_id: len(cache.hashes) for worker_id, cache in self._caches.copy().items()}

    def _take_mask(self) -> int:
        if self._free_masks:
            return self._free_masks.pop()
        self._num_masks += 1
        return 1 << (self._num_masks - 1)

    def _make_void(self, worker_id: str) -> None:
        cache = self._caches.pop(worker_id, None)
        if cache is not None:
            self._void.append(cache)
            self._sweep()

    def _sweep(self) -> None:
        """Some of what is void, so that no message and no removal takes long, however large caches are."""
        if not self._void:
            return
        cache = self._void[-1]
        self._drop((cache.hashes.pop() for _ in range(min(_SWEEP_BLOCKS, len(cache.hashes)))), cache.mask)
        if not cache.hashes:
            self._free_masks.append(self._void.pop().mask)

    def _drop(self, hashes: Iterable[bytes], mask: int) -> None:
        holders = self._holders
        for block_hash in hashes:
            left = holders.get(block_hash, 0) & ~mask
            if left:
                holders[block_hash] = left
            else:
                holders.pop(block_hash, None)

    def _coming(self, block_hash: bytes, now_s: float) -> int:
        expectations = self._expected.get(block_hash, ())
        return sum(self._caches[worker_id].mask for worker_id, until_s in expectations if until_s > now_s)

    def _withdraw(self, hashes: Iterable[bytes], worker_id: str, until_s: float = inf) -> None:
        """Nothing is expected of the worker any more, but for what is expected beyond ``until_s``."""
        for block_hash in hashes:
            expectations = self._expected.get(block_hash)
            if expectations is None:
                continue
            left = tuple(found for found in expectations if found[0] != worker_id or found[1] > until_s)
            if not left:
                del self._expected[block_hash]
            elif len(left) < len(expectations):
                self._expected[block_hash] = left


def _merge(others: tuple[_Expectation, ...], new: _Expectation) -> tuple[_Expectation, ...]:
    """Of one worker the longer one counts."""
    if any(worker_id == new[0] and until_s >= new[1] for worker_id, until_s in others):
        return others
    return (*(found for found in others if found[0] != new[0]), new)


def _set(tokens: dict[str, int], worker_of: dict[int, str], masks: int, value: int) -> None:
    """Of the workers whose bits are in ``masks``."""
    while masks:
        lowest = masks & -masks
        tokens[worker_of[lowest]] = value
        masks ^= lowest
