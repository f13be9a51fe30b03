"""Index of the prompt blocks that each worker's prefix cache holds, according to the workers' events.

One dictionary maps hashes to bit masks of workers, so a prompt costs one look-up per block for any number of workers.
Hashes are chained, so a worker holds a prompt up to the first hash that it lacks. The hashes of prompts in progress are
kept.
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
"""Tokens of the prompts in progress whose hashes are kept, about 10 MB."""


@dataclass(frozen=True, slots=True)
class PromptHashes:
    """The block hashes of a prompt.

    Attributes:
        blocks: hashes of the prompt's full blocks, first to last.
        num_usable: blocks that a cache can provide. At least one token is computed, because its logits are needed.
    """

    block_size: int
    blocks: tuple[bytes, ...]
    num_usable: int


def prompt_hashes(
    prompt_token_ids: Sequence[int], block_size: int, *, salt: str = "", key: bytes = b""
) -> PromptHashes:
    """Hashes the full blocks of a prompt; for ``salt`` and ``key`` see :func:`hash_blocks`."""
    num_tokens = len(prompt_token_ids)
    blocks = hash_blocks(prompt_token_ids, block_size, num_tokens // block_size, salt=salt, key=key)
    return PromptHashes(block_size, tuple(blocks), max(0, num_tokens - 1) // block_size)


class PromptHasher:
    """Caches :func:`prompt_hashes` of the newest prompts until :meth:`forget`, by identity and salt.

    A prompt object must not change.
    """

    def __init__(self, block_size: int, hash_key: bytes = b"", kept_tokens: int = _KEPT_TOKENS) -> None:
        self.block_size = block_size
        self._hash_key = hash_key
        self._kept_tokens = kept_tokens
        self._num_tokens = 0
        # By id, holding the prompt.
        self._newest: OrderedDict[tuple[int, str], tuple[Sequence[int], PromptHashes]] = OrderedDict()

    def hash(self, prompt_token_ids: Sequence[int], salt: str = "") -> PromptHashes:
        key = (id(prompt_token_ids), salt)
        kept = self._newest.get(key)
        if kept is not None:
            self._newest.move_to_end(key)
            return kept[1]
        hashes = prompt_hashes(prompt_token_ids, self.block_size, salt=salt, key=self._hash_key)
        self._newest[key] = (prompt_token_ids, hashes)
        self._num_tokens += len(prompt_token_ids)
        while self._num_tokens > self._kept_tokens and len(self._newest) > 1:
            _, (oldest, _) = self._newest.popitem(last=False)
            self._num_tokens -= len(oldest)
        return hashes

    def forget(self, prompt_token_ids: Sequence[int], salt: str = "") -> None:
        """Drops a prompt and its hashes. Unknown prompts are ignored."""
        if self._newest.pop((id(prompt_token_ids), salt), None) is not None:
            self._num_tokens -= len(prompt_token_ids)


_SWEEP_BLOCKS = 4096
"""Blocks of removed caches to sweep at a time, which takes some milliseconds at most."""


_Expectation = tuple[str, float]
"""(worker, end of validity). All blocks of a prompt share one object to save memory."""


@dataclass(slots=True)
class _Cache:
    """The known blocks of one worker. ``mask`` has exactly the worker's bit set."""

    mask: int
    hashes: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """The prefix caches of all workers. Not thread-safe, except :meth:`sizes`.

    Args:
        block_size: tokens per block, in the caches of all workers.
        clock: monotonic seconds.
        hash_key: key of the workers' block hashes.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic, hash_key: bytes = b"") -> None:
        self.block_size = block_size
        self._clock = clock
        self._hasher = PromptHasher(block_size, hash_key)
        self._holders: dict[bytes, int] = {}
        self._caches: dict[str, _Cache] = {}
        self._void: list[_Cache] = []  # removed; their bits are reused once swept
        self._num_masks = 0
        self._free_masks: list[int] = []
        self._expected: dict[bytes, tuple[_Expectation, ...]] = {}  # at most one per worker
        self._expiries: list[tuple[float, str, Sequence[bytes]]] = []

    def apply(self, worker_id: str, events: worker_pb2.CacheEvents) -> None:
        """Applies the cache events of a worker.

        Raises:
            ValueError: the message does not consist of hashes; nothing is applied.
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
            self._withdraw(stored, worker_id)  # the event replaces the expectation
        self._sweep()

    def remove(self, worker_id: str) -> None:
        """Forgets a worker. Unknown workers are ignored."""
        self._make_void(worker_id)
        self._withdraw(tuple(self._expected), worker_id)
        self._expiries = [expiry for expiry in self._expiries if expiry[1] != worker_id]
        heapq.heapify(self._expiries)

    def expect(self, worker_id: str, prompt: PromptHashes | Sequence[int], until_s: float, salt: str = "") -> None:
        """Counts the blocks of a prompt that is sent to a worker as stored, until the worker reports them.

        So a burst of prompts with a common prefix stays on one worker before the first of them is computed.

        Args:
            until_s: end of validity on the clock, since the request may fail.
            salt: that of the request; prompts are known only to requests with the same salt.
        """
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            over_s, name, blocks = heapq.heappop(self._expiries)
            self._withdraw(blocks, name, over_s)
        cache = self._caches.get(worker_id)
        if cache is None:
            return  # its cache is not followed, so no event would replace the expectation
        coming = [block_hash for block_hash in self.hashes(prompt, salt).blocks if block_hash not in cache.hashes]
        expectation = (worker_id, until_s)
        alone = (expectation,)
        for block_hash in coming:
            others = self._expected.get(block_hash)
            self._expected[block_hash] = alone if others is None else _merge(others, expectation)
        if coming:
            heapq.heappush(self._expiries, (until_s, worker_id, coming))

    def cached_tokens(
        self, worker_ids: Iterable[str], prompt: PromptHashes | Sequence[int], salt: str = ""
    ) -> dict[str, int]:
        """Leading tokens of a prompt that each worker holds or is expected to hold (:meth:`expect`); 0 if unknown.

        Args:
            prompt: its token ids, in an object that does not change, or its hashes.
            salt: that of the request.
        """
        tokens = dict.fromkeys(worker_ids, 0)
        worker_of = {cache.mask: name for name in tokens if (cache := self._caches.get(name)) is not None}
        left = sum(worker_of)
        if not left:
            return tokens
        hashes = self.hashes(prompt, salt)
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

    def hashes(self, prompt: PromptHashes | Sequence[int], salt: str = "") -> PromptHashes:
        """The hashes of a prompt, cached until :meth:`forget_prompt`.

        Raises:
            ValueError: the prompt was hashed with another block size.
        """
        if not isinstance(prompt, PromptHashes):
            return self._hasher.hash(prompt, salt)
        if prompt.block_size != self.block_size:
            raise ValueError(
                f"the prompt is hashed in blocks of {prompt.block_size} tokens, expected {self.block_size}"
            )
        return prompt

    def forget_prompt(self, prompt: Sequence[int], salt: str) -> None:
        """Drops the cached hashes of a prompt. Another request with the same object only costs hashing it again."""
        self._hasher.forget(prompt, salt)

    def num_blocks(self, worker_id: str) -> int:
        """Blocks known to be in a worker's cache."""
        cache = self._caches.get(worker_id)
        return len(cache.hashes) if cache is not None else 0

    def sizes(self) -> dict[str, int]:
        """:meth:`num_blocks` by worker. Thread-safe."""
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
        """Sweeps some blocks of removed caches. Small portions keep each message and removal fast."""
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
        """Removes the worker's expectations for these hashes, except those valid beyond ``until_s``."""
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
    """Adds an expectation. Of two for the same worker, the one valid longer is kept."""
    if any(worker_id == new[0] and until_s >= new[1] for worker_id, until_s in others):
        return others
    return (*(found for found in others if found[0] != new[0]), new)


def _set(tokens: dict[str, int], worker_of: dict[int, str], masks: int, value: int) -> None:
    """Sets the value of all workers whose bits are in ``masks``."""
    while masks:
        lowest = masks & -masks
        tokens[worker_of[lowest]] = value
        masks ^= lowest
