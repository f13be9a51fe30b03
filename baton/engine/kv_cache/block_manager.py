"""Allocates blocks to requests: prefix hits first, fresh blocks for the rest, all released at the end."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.block_hashes import hash_blocks
from baton.core.request import Request, RequestStatus
from baton.engine.kv_cache.block_pool import BlockPool, BlockUsage
from baton.engine.kv_cache.prefix_cache import PrefixCache


class BlockManager:
    """The scheduler's and the KV hand-off's interface to the block pool.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        prefix_caching: False disables lookups and insertions.
        hash_key: see :func:`baton.core.block_hashes.hash_blocks`.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, hash_key: bytes = b"") -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._hash_key = hash_key
        self.prefix_cache = PrefixCache(block_size)
        self.pool = BlockPool(num_blocks, on_evict=self.prefix_cache.forget)
        self._num_remembered: dict[str, int] = {}  # request id → full blocks that ``remember`` has inserted

    def usage(self) -> BlockUsage:
        return self.pool.usage()

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, request: Request) -> int:
        """Gives a request without blocks those of its cached prefix.

        At least one token stays uncached, because its logits are needed. For log probabilities of the prompt, the
        logits of all are.

        Returns:
            Number of tokens whose KV is cached.
        """
        if not self.prefix_caching or request.block_ids or request.prompt_logprobs is not None:
            return 0
        usable = (request.num_tokens - 1) // self.block_size
        blocks = self.find_prefix(request, usable)
        self.pool.share(blocks)
        request.block_ids = blocks
        return len(blocks) * self.block_size

    def find_prefix(self, request: Request, max_blocks: int) -> list[int]:
        """Cached blocks of the request's longest known prefix, at most ``max_blocks``; takes no reference."""
        if not self.prefix_caching:
            return []
        self._hash_blocks(request, max_blocks)
        token_ids = request.tokens_between(0, max_blocks * self.block_size)
        return self.prefix_cache.find(request.block_hashes[:max_blocks], token_ids)

    def _hash_blocks(self, request: Request, num_full: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        num_known = len(hashes)
        if num_known < num_full:
            tokens = request.tokens_between(num_known * size, num_full * size)
            parent = hashes[-1] if hashes else None
            hashes += hash_blocks(
                tokens, size, num_full - num_known, parent, salt=request.cache_salt, key=self._hash_key
            )

    def can_grow(self, request: Request, num_tokens: int) -> bool:
        """Whether ``grow`` to ``num_tokens`` positions would succeed now."""
        return self.num_blocks_for(num_tokens) - len(request.block_ids) <= self.pool.num_free

    def grow(self, request: Request, num_tokens: int) -> None:
        """Allocates blocks for positions ``[0, num_tokens)``.

        Raises:
            OutOfBlocksError: too few blocks are free; the request keeps what it had.
        """
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            request.block_ids.extend(self.pool.allocate(missing))

    def take_all(self, request: Request) -> bool:
        """Allocates blocks for all known tokens of a waiting request; cached blocks come first and count as computed.

        A request that does not fit looks up its prefix on every try. This is intended: the lookup marks the prefix as
        recently used, so that running requests evict it last.

        Returns:
            False, with nothing taken, when too few blocks are free.
        """
        cached = self.match_prefix(request)
        if not self.can_grow(request, request.num_tokens):
            if cached:
                self.free(request)
            return False
        self.grow(request, request.num_tokens)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = max(request.num_cached_tokens, min(cached, request.num_prompt_tokens))
        request.num_computed_tokens = max(request.num_computed_tokens, cached)
        return True

    def take_for_import(self, holder: Request, num_running: int) -> int | None:
        """Allocates blocks for imported KV: cached prefix blocks are shared, the rest is fresh.

        Args:
            holder: owns them until :meth:`hand_over`.
            num_running: running requests. One free block stays for each to grow into; otherwise a new arrival would
                only preempt them.

        Returns:
            Number of leading tokens that are cached; ``None``, with nothing taken, when too few blocks are free.
        """
        cached = self.find_prefix(holder, holder.num_tokens // self.block_size)
        self.pool.share(cached)
        missing = self.num_blocks_for(holder.num_tokens) - len(cached)
        if missing > 0 and missing + num_running > self.pool.num_free:
            self.pool.release(cached)
            return None
        holder.block_ids = cached + self.pool.allocate(missing)
        return len(cached) * self.block_size

    @staticmethod
    def hand_over(holder: Request, request: Request) -> None:
        """Moves the blocks of a holder to the request, which continues where their KV ends."""
        request.block_ids, holder.block_ids = holder.block_ids, []
        request.block_hashes = holder.block_hashes
        request.num_computed_tokens = holder.num_tokens

    def remember(self, request: Request, num_computed_tokens: int) -> None:
        """Inserts the full blocks among the first ``num_computed_tokens`` into the prefix cache."""
        if not self.prefix_caching:
            return
        num_full = num_computed_tokens // self.block_size
        self._hash_blocks(request, num_full)
        for index in range(self._num_remembered.get(request.request_id, 0), num_full):
            parent = request.block_hashes[index - 1] if index else None
            tokens = request.tokens_between(index * self.block_size, (index + 1) * self.block_size)
            block = request.block_ids[index]
            if self.prefix_cache.insert(request.block_hashes[index], parent, tokens, block):
                self.pool.mark_cached(block)
        self._num_remembered[request.request_id] = num_full

    def forget(self, request: Request) -> None:
        """Removes the request's blocks from the prefix cache, because their KV is not finite."""
        for block in request.block_ids:
            self.prefix_cache.forget(block)
            self.pool.unmark_cached(block)

    def free(self, request: Request) -> None:
        """Releases all blocks of a request."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        self._num_remembered.pop(request.request_id, None)

    def check(self, holders: Iterable[Request]) -> list[str]:
        """Describes leaked or doubly freed blocks, given every request that may hold blocks."""
        return self.pool.check(request.block_ids for request in holders)
