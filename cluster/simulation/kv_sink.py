"""The receiving end of hand-offs without payload. Blocks are reserved, committed and claimed as on a real worker."""

from __future__ import annotations

import asyncio
from collections import deque

from baton.core.errors import ContextLengthError, OutOfBlocksError, TransferError
from baton.core.request import Request, SamplingParams
from baton.engine.kv_cache.block_manager import BlockManager
from baton.kv_transfer.base import PartHeader, Reservation, TransferOffer
from baton.kv_transfer.pending_imports import PendingImport, PendingImports
from baton.rpc.channel import as_baton_error
from cluster.simulation.engine import SimulatedEngine

_HOLDER_PARAMS = SamplingParams()


class SimulatedKVSink:
    """Implements :class:`baton.kv_transfer.base.KVSink`.

    Args:
        claim_timeout_s: how long committed KV waits for its request, and a request for its KV.
    """

    def __init__(self, engine: SimulatedEngine, blocks: BlockManager, claim_timeout_s: float) -> None:
        self._engine = engine
        self._blocks = blocks
        self._loop = asyncio.get_running_loop()
        self._imports = PendingImports(PendingImport, self.release, claim_timeout_s)
        self._waiting: deque[tuple[Request, asyncio.Future[int]]] = deque()
        self._retry_is_due = False

    @property
    def num_active(self) -> int:
        """Transfers that hold blocks or wait for some, without claimed ones."""
        return sum(1 for entry in self._imports.all if entry.holder is not None)

    def holders(self) -> list[Request]:
        """Every prompt that holds blocks and has not been handed to a request."""
        return [entry.holder for entry in self._imports.all if entry.holder is not None]

    async def reserve(self, offer: TransferOffer) -> Reservation:
        """Reserves blocks for a prompt. Waits for room until the offer's deadline."""
        holder = Request(offer.transfer_id, list(offer.token_ids), _HOLDER_PARAMS, cache_salt=offer.cache_salt)
        if self._blocks.num_blocks_for(holder.num_tokens) > self._blocks.pool.num_blocks:
            raise ContextLengthError(
                f"The prompt of {holder.num_tokens} tokens does not fit into this worker's "
                f"{self._blocks.pool.num_blocks} KV blocks."
            )
        entry = self._imports.entry(offer.transfer_id)
        if entry.holder is not None:
            raise TransferError(f"transfer {offer.transfer_id} has already begun.")
        entry.holder = holder
        try:
            return Reservation(await self._find_room(holder, offer.deadline_s))
        except BaseException as error:
            went_away = isinstance(error, asyncio.CancelledError)
            reason = "the sender disconnected" if went_away else as_baton_error(error, offer.transfer_id).message
            self.abort(offer.transfer_id, reason)
            raise

    async def _find_room(self, holder: Request, deadline_s: float) -> int:
        cached = None if self._waiting else self._try_reserve(holder)
        if cached is not None:
            return cached
        room: asyncio.Future[int] = self._loop.create_future()
        self._waiting.append((holder, room))
        try:
            async with asyncio.timeout(deadline_s):
                return await room
        except TimeoutError:
            raise OutOfBlocksError(
                f"The decode worker had no free KV blocks for {holder.num_tokens} tokens within {deadline_s:g} s."
            ) from None
        finally:
            self.retry_soon()  # one that gave up may have blocked others

    def _try_reserve(self, holder: Request) -> int | None:
        """Returns the number of cached leading tokens, or ``None`` if the others do not fit."""
        return self._blocks.take_for_import(holder, self._engine.num_running)

    def _stop_waiting(self, given_up: Request, transfer_id: str) -> None:
        """Fails a waiting reservation of an aborted transfer, whose blocks would never be freed."""
        for holder, room in self._waiting:
            if holder is given_up and not room.done():
                room.set_exception(
                    TransferError(f"transfer {transfer_id} was cancelled while it waited for KV blocks.")
                )

    def retry_soon(self) -> None:
        """Retries waiting reservations in the next turn of the event loop, after blocks were freed."""
        if self._waiting and not self._retry_is_due:
            self._retry_is_due = True
            self._loop.call_soon(self._retry)

    def _retry(self) -> None:
        self._retry_is_due = False
        while self._waiting:
            holder, room = self._waiting[0]
            if not room.done():
                cached = self._try_reserve(holder)
                if cached is None:
                    return
                room.set_result(cached)
            self._waiting.popleft()

    async def write(self, transfer_id: str, header: PartHeader, payload: memoryview, checksum: int) -> None:
        """Raises :class:`TransferError`, since simulated workers take no real KV."""
        raise TransferError(
            "a simulated worker cannot receive KV; either all workers of a cluster must be simulated, or none."
        )

    def place(self, transfer_id: str, header: PartHeader, num_bytes: int) -> None:
        """Does nothing, since there is no payload."""

    async def commit(self, transfer_id: str, draft_state: bytes | None = None) -> int:
        entry = self._imports.get(transfer_id)
        if entry is None or entry.holder is None or entry.committed.done():
            raise TransferError(f"transfer {transfer_id} is not open.")
        self._blocks.remember(entry.holder, entry.holder.num_tokens)
        self._imports.commit(entry, self._loop.time())
        return 0

    def abort(self, transfer_id: str, reason: str) -> None:
        """Aborts a transfer. A request that waits for it gets the reason."""
        entry = self._imports.get(transfer_id)
        if entry is not None:
            self._imports.fail(entry, reason)

    async def claim(self, transfer_id: str) -> PendingImport:
        """Waits for a committed transfer. The caller must hand it over or :meth:`release` it."""
        return await self._imports.claim(transfer_id)

    def abandon(self, transfer_id: str) -> None:
        self._imports.abandon(transfer_id)

    def release(self, entry: PendingImport) -> None:
        """Frees the blocks that no request has taken over."""
        holder, entry.holder = entry.holder, None
        if holder is not None:
            self._blocks.free(holder)
            self._stop_waiting(holder, entry.transfer_id)
            self._engine.wake()
            self.retry_soon()

    def hand_over(self, entry: PendingImport, request: Request) -> None:
        """Transfers the blocks to ``request``, which starts after its KV."""
        holder, entry.holder = entry.holder, None
        if holder is None:
            raise RuntimeError(f"transfer {entry.transfer_id} holds no blocks")
        self._blocks.hand_over(holder, request)
