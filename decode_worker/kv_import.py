"""The receiving side of the hand-off: reserves blocks, takes parts in, commits, and lets the request claim its KV.

A transfer's blocks belong to the import until the request claims them. If anything goes wrong before that (the sender
dies, a part is damaged, no request claims the KV), the blocks go back to the pool. The scheduler takes no part in this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.core.errors import (
    ChecksumError,
    ContextLengthError,
    LayoutMismatchError,
    OutOfBlocksError,
    TransferError,
)
from baton.core.kv_spec import KVEncoding
from baton.core.request import Request, SamplingParams, check_token_ids
from baton.engine.async_engine import AsyncEngine
from baton.engine.kv_cache.kv_copies import WorkMark
from baton.kv_transfer.base import PartHeader, Reservation, TransferOffer
from baton.kv_transfer.codec import checksum as compute_checksum
from baton.kv_transfer.pending_imports import PendingImport, PendingImports
from baton.rpc.channel import as_baton_error


@dataclass(slots=True, eq=False)
class Import(PendingImport):
    """One transfer. The ``block_ids`` of its holder belong to the engine's thread.

    Attributes:
        next_token: for each layer, the position up to which KV has arrived; empty until there is room for it.
        takes_draft: whether the draft's KV and state come with the model's.
        encoding: the encoding that parts may use. Native parts are always allowed.
        free_after: marks the engine's last use of the blocks for other requests; see ``PagedKVCache.mark``.
        brought: marks the copy of the last part into the cache; see ``PagedKVCache.import_bytes``.
    """

    next_token: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    takes_draft: bool = False
    encoding: KVEncoding = KVEncoding.NATIVE
    draft_state: bytes | None = None
    free_after: WorkMark | None = None
    brought: WorkMark | None = None


_MAX_TRYING = 8
"""Transfers that try to get room whenever blocks are freed; later ones wait for a place among them."""
_OVERTAKING_SHARE = 0.5
"""Share of a transfer's waiting time during which later ones may take room before it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A place in the line for blocks."""

    overtaken_until_s: float


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Implements :class:`baton.kv_transfer.base.PartPlace` in the cache, or in staging memory that is copied there."""

    views: list[memoryview]
    check: Callable[[], None]
    filled: Callable[[int, int], Coroutine[Any, Any, None]]


def _check_sum(transfer_id: str, found: int, checksum: int) -> None:
    if found != checksum:
        raise ChecksumError(f"a KV part of transfer {transfer_id} was corrupted during the transfer.")


class KVImporter:
    """Implements :class:`baton.kv_transfer.base.KVSink` over a decode worker's engine.

    Args:
        claim_timeout_s: how long committed KV waits for its request, and how long a request waits for its KV.
        adopt_draft: called in the engine's thread for every request that claims KV, with the draft's state, if one
            was sent, and the first position that was sent.
        encodings: encodings besides the native one that senders may choose.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        claim_timeout_s: float,
        adopt_draft: Callable[[Request, bytes | None, int], None] = lambda request, state, first_new: None,
        encodings: Collection[KVEncoding] = (),
    ) -> None:
        self._engine = engine
        self._encodings = encodings
        self._adopt_draft = adopt_draft
        self._imports = PendingImports(Import, self.release, claim_timeout_s)
        self._trying = asyncio.Semaphore(_MAX_TRYING)
        self._line: list[_Place] = []  # of those that try, in order of arrival
        self._holders: set[Request] = set()  # engine's thread
        self.num_bytes_received = 0
        engine.block_holders.append(self._held_blocks)

    @property
    def num_active(self) -> int:
        """The number of unclaimed transfers that hold blocks or wait for blocks."""
        return sum(1 for entry in self._imports.all if entry.holder is not None and not entry.failed)

    async def reserve(self, offer: TransferOffer) -> Reservation:
        """See :class:`KVSink`. Waits for room until the offer's deadline."""
        spec = self._engine.runner.spec
        if differences := spec.differences(offer.spec):
            raise LayoutMismatchError(
                f"The prefill and the decode worker cannot exchange KV. {'; '.join(differences)}. "
                "Both pools must run the same model, dtype, engine.block_size, engine.weights and engine.kv_cache."
            )
        limit = self._engine.scheduler.limits.max_model_len
        if len(offer.token_ids) > limit:
            raise ContextLengthError(
                f"The prompt has {len(offer.token_ids)} tokens, but the decode worker takes at most {limit}."
            )
        check_token_ids(offer.token_ids, self._engine.runner.loaded.vocab_size, "token_ids")
        holder = Request(offer.transfer_id, list(offer.token_ids), SamplingParams(), cache_salt=offer.cache_salt)
        needed = self._engine.blocks.num_blocks_for(holder.num_tokens)
        if not 0 < needed <= self._engine.blocks.pool.num_blocks:
            raise ContextLengthError(
                f"The prompt of {holder.num_tokens} tokens needs {needed} KV blocks, "
                f"but the decode worker has {self._engine.blocks.pool.num_blocks}."
            )
        entry = self._imports.entry(offer.transfer_id)
        if entry.holder is not None:
            raise TransferError(f"transfer {offer.transfer_id} has already begun.")
        entry.holder = holder
        try:
            cached = await self._wait_for_room(entry, holder, offer.deadline_s)
            if cached is None or entry.failed:
                raise TransferError(f"transfer {offer.transfer_id} was cancelled while it waited for KV blocks.")
        except BaseException as error:
            went_away = isinstance(error, asyncio.CancelledError)
            self._imports.fail(
                entry, "the sender disconnected" if went_away else as_baton_error(error, offer.transfer_id).message
            )
            raise
        entry.num_cached_tokens = cached
        entry.takes_draft = spec.shares_draft_with(offer.spec)
        entry.next_token = [cached] * len(spec.all_layers if entry.takes_draft else spec.layers)
        entry.encoding = next((wanted for wanted in offer.encodings if wanted in self._encodings), KVEncoding.NATIVE)
        return Reservation(cached, entry.takes_draft, entry.encoding)

    async def _wait_for_room(self, entry: Import, holder: Request, deadline_s: float) -> int | None:
        """The number of leading tokens that are cached; ``None`` if the transfer fails before they are known."""
        if self._may_try(None):  # free room is given even when the deadline is 0
            cached = await self._engine.call(lambda: self._try_reserve(entry, holder))
            if cached is not None:
                return cached
        place = _Place(time.monotonic() + deadline_s * _OVERTAKING_SHARE)
        try:
            async with asyncio.timeout(deadline_s), self._trying:
                self._line.append(place)
                while not entry.failed:  # checked before every try: a failed import is released after its last try
                    freed = self._engine.blocks_freed
                    if self._may_try(place):
                        cached = await self._engine.call(lambda: self._try_reserve(entry, holder))
                        if cached is not None:
                            return cached
                    await freed.wait()
        except TimeoutError:
            raise OutOfBlocksError(
                f"The decode worker had no free KV blocks for {holder.num_tokens} tokens within {deadline_s:g} s."
            ) from None
        finally:
            if place in self._line:
                self._line.remove(place)
                self._engine.notify_freed()  # one that came later may try now
        return None

    def _may_try(self, place: _Place | None) -> bool:
        """Whether a transfer may take room: the first in line always, later ones while the first has time left.

        So a large prompt does not stop the others at once, and they do not starve it.
        """
        return not self._line or self._line[0] is place or time.monotonic() < self._line[0].overtaken_until_s

    def _try_reserve(self, entry: Import, holder: Request) -> int | None:
        """Engine's thread. The number of leading tokens that are cached; ``None`` when the others do not fit."""
        cached = self._engine.blocks.take_for_import(holder, self._engine.scheduler.num_running)
        if cached is not None:
            self._holders.add(holder)
            entry.free_after = self._engine.runner.cache.mark()
        return cached

    async def write(self, transfer_id: str, header: PartHeader, payload: memoryview, checksum: int) -> None:
        """See :class:`KVSink`. Does not await between the check and the copy, so the blocks cannot be freed between."""
        entry, holder = self._check_due(transfer_id, header, len(payload))
        _check_sum(transfer_id, compute_checksum(payload), checksum)
        self._store(entry, holder, header, payload)
        self._arrived(entry, header, len(payload))
        await self._catch_up()

    def place(self, transfer_id: str, header: PartHeader, num_bytes: int) -> CachePlace | None:
        """See :class:`KVSink`."""
        entry, holder = self._check_due(transfer_id, header, num_bytes)
        cache = self._engine.runner.cache
        staged = cache.staging(num_bytes)
        if staged is not None:
            views: list[memoryview] | None = [staged.numpy().data]
        elif header.encoding is not KVEncoding.NATIVE:
            return None
        else:
            views = cache.pieces(holder.block_ids, header.token_start, header.token_end, header.layers)
        if views is None:
            return None

        def check() -> None:
            if self._open_import(transfer_id)[0] is not entry:
                raise TransferError(f"transfer {transfer_id} has ended.")

        async def filled(found: int, checksum: int) -> None:
            check()
            self._check_due(transfer_id, header, num_bytes)
            _check_sum(transfer_id, found, checksum)
            if staged is not None:
                self._store(entry, holder, header, staged)
            self._arrived(entry, header, num_bytes)
            await self._catch_up()

        return CachePlace(views, check, filled)

    def _store(self, entry: Import, holder: Request, header: PartHeader, data: memoryview | torch.Tensor) -> None:
        span, cache = (header.token_start, header.token_end, header.layers), self._engine.runner.cache
        entry.brought = cache.import_bytes(holder.block_ids, *span, data, header.encoding, entry.free_after)

    async def _catch_up(self) -> None:
        """Waits while the device is behind with its copies. Parts are acknowledged only after this."""
        cache = self._engine.runner.cache
        if (behind := cache.backlog()) is not None:
            await asyncio.to_thread(cache.wait, behind)

    def _check_due(self, transfer_id: str, header: PartHeader, num_bytes: int) -> tuple[Import, Request]:
        """The transfer and the holder of its blocks. Raises :class:`TransferError` unless this part is due."""
        entry, holder = self._open_import(transfer_id)
        spec = self._engine.runner.spec
        if not 0 <= header.layer_start < header.layer_end <= len(entry.next_token):
            raise TransferError(
                f"a KV part names layers {header.layer_start} to {header.layer_end} of {len(entry.next_token)}."
            )
        due = entry.next_token[header.layer_start : header.layer_end]
        if any(token != header.token_start for token in due) or not 0 < header.token_count <= (
            holder.num_tokens - header.token_start
        ):
            raise TransferError(
                f"a KV part contains positions {header.token_start} to {header.token_end}, but position "
                f"{due[0]} was expected "
                f"in a prompt of {holder.num_tokens} tokens."
            )
        if header.encoding not in (KVEncoding.NATIVE, entry.encoding):
            raise TransferError(f"a KV part is encoded as {header.encoding}, which was not agreed on.")
        if num_bytes != header.num_bytes(spec):
            raise TransferError(f"a KV part has {num_bytes} bytes, but its header announced {header.num_bytes(spec)}.")
        return entry, holder

    def _arrived(self, entry: Import, header: PartHeader, num_bytes: int) -> None:
        for layer in header.layers:
            entry.next_token[layer] = header.token_end
        entry.num_bytes += num_bytes
        self.num_bytes_received += num_bytes

    async def commit(self, transfer_id: str, draft_state: bytes | None = None) -> int:
        """See :class:`KVSink`."""
        entry, holder = self._open_import(transfer_id)
        if any(token != holder.num_tokens for token in entry.next_token):
            raise TransferError(
                f"transfer {transfer_id} was committed at position {min(entry.next_token)} of {holder.num_tokens}."
            )
        await self._engine.call(lambda: self._remember(entry, holder))
        if entry.committed.done():
            raise TransferError(f"transfer {transfer_id} was cancelled while it was committed.")
        entry.draft_state = draft_state
        self._imports.commit(entry, time.monotonic())
        return entry.num_bytes

    def _remember(self, entry: Import, holder: Request) -> None:
        """Makes the blocks readable, as a cached prefix and for the request. Runs in the engine's thread."""
        self._engine.runner.cache.join(entry.brought)
        self._engine.blocks.remember(holder, holder.num_tokens)

    def abort(self, transfer_id: str, reason: str) -> None:
        """See :class:`KVSink`. The reason is the error of a request that waits for the transfer."""
        entry = self._imports.get(transfer_id)
        if entry is not None:
            self._imports.fail(entry, reason)

    async def claim(self, transfer_id: str) -> Import:
        """See :meth:`PendingImports.claim`. Pass an import that is not handed over to :meth:`release`."""
        return await self._imports.claim(transfer_id)

    def abandon(self, transfer_id: str) -> None:
        """See :meth:`PendingImports.abandon`."""
        self._imports.abandon(transfer_id)

    def hand_over(self, entry: Import, request: Request) -> None:
        """Gives the blocks to ``request``, which starts where its KV ends. Runs in the engine's thread."""
        holder = entry.holder
        if holder is None:
            raise RuntimeError(f"transfer {entry.transfer_id} holds no blocks")
        self._engine.blocks.hand_over(holder, request)
        self._holders.discard(holder)
        self._adopt_draft(request, entry.draft_state, entry.num_cached_tokens)

    def release(self, entry: Import) -> None:
        """Frees the import's blocks unless they were handed over."""
        self._engine.post(lambda: self._free(entry))

    def _open_import(self, transfer_id: str) -> tuple[Import, Request]:
        entry = self._imports.get(transfer_id)
        if entry is None or entry.holder is None or not entry.next_token or entry.committed.done():
            raise TransferError(f"transfer {transfer_id} is not open.")
        return entry, entry.holder

    def _free(self, entry: Import) -> None:
        """Runs in the engine's thread."""
        if entry.holder is not None:
            try:
                self._engine.runner.cache.join(entry.brought)  # the next owner writes only after pending copies
            finally:
                self._engine.blocks.free(entry.holder)
                self._holders.discard(entry.holder)
                self._engine.notify_freed_threadsafe()

    def _held_blocks(self) -> Iterable[Sequence[int]]:
        return [holder.block_ids for holder in self._holders]
