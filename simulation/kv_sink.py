"""The receiving end of hand-offs without payload: blocks are reserved, committed and claimed as on a decode worker."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from cluster.kv_transfer.base import PartHeader, Reservation, TransferOffer
from engine.block_manager import BlockManager
from engine.errors import ContextLengthError, OutOfBlocksError, TransferError
from engine.request import Request, SamplingParams
from simulation.engine import SimulatedEngine

_HOLDER_PARAMS = SamplingParams()


@dataclass(slots=True, eq=False)
class Import:
    """Room for one prompt.

    Attributes:
        committed: done when its KV is there; fails when it never will be.
    """

    transfer_id: str
    committed: asyncio.Future[None]
    holder: Request | None = None
    committed_s: float = 0.0
    is_claimed: bool = False
    expiry: asyncio.TimerHandle | None = None


class SimulatedKVSink:
    """Implements :class:`cluster.kv_transfer.base.KVSink`.

    Args:
        claim_timeout_s: how long committed KV waits for its request, and a request for its KV.
    """

    def __init__(self, engine: SimulatedEngine, blocks: BlockManager, claim_timeout_s: float) -> None:
        self._engine = engine
        self._blocks = blocks
        self._claim_timeout_s = claim_timeout_s
        self._loop = asyncio.get_running_loop()
        self._imports: dict[str, Import] = {}
        self._waiting: deque[tuple[Request, asyncio.Future[int]]] = deque()
        self._retry_is_due = False

    @property
    def num_active(self) -> int:
        """Transfers that hold blocks or wait for some, claimed ones not counted."""
        return sum(1 for entry in self._imports.values() if entry.holder is not None)

    def holders(self) -> list[Request]:
        """Every prompt that holds blocks and is no request's yet."""
        return [entry.holder for entry in self._imports.values() if entry.holder is not None]

    async def reserve(self, offer: TransferOffer) -> Reservation:
        """See :class:`KVSink`. Waits for room until the offer's deadline."""
        holder = Request(offer.transfer_id, list(offer.token_ids), _HOLDER_PARAMS)
        if self._blocks.num_blocks_for(holder.num_tokens) > self._blocks.pool.num_blocks:
            raise ContextLengthError(
                f"The prompt of {holder.num_tokens} tokens does not fit into this worker's "
                f"{self._blocks.pool.num_blocks} KV blocks."
            )
        entry = self._entry(offer.transfer_id)
        if entry.holder is not None:
            raise TransferError(f"transfer {offer.transfer_id} has begun already.")
        entry.holder = holder
        try:
            return Reservation(await self._find_room(holder, offer.deadline_s))
        except BaseException:
            self.abort(offer.transfer_id, "its sender gave up, or there was no room")
            raise

    async def _find_room(self, holder: Request, deadline_s: float) -> int:
        cached = None if self._waiting else self._try_reserve(holder)
        if cached is not None:
            return cached
        room: asyncio.Future[int] = self._loop.create_future()
        self._waiting.append((holder, room))
        try:
            return await asyncio.wait_for(room, deadline_s)
        except TimeoutError:
            raise OutOfBlocksError(
                f"The decode worker had no room for {holder.num_tokens} tokens within {deadline_s:g} s."
            ) from None
        finally:
            self.retry_soon()  # who gave up may have stood in front of others

    def _try_reserve(self, holder: Request) -> int | None:
        """Leading tokens that are cached; None when the others do not fit."""
        return self._blocks.take_for_import(holder, self._engine.num_running)

    def retry_soon(self) -> None:
        """Blocks have become free: whoever waits for room is asked again, when what frees them has done its work."""
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
        """See :class:`KVSink`. Real KV has no business here."""
        raise TransferError("a simulated worker takes no KV; all workers of a cluster must be simulated, or none.")

    async def commit(self, transfer_id: str, draft_state: bytes | None = None) -> int:
        """See :class:`KVSink`."""
        entry = self._imports.get(transfer_id)
        if entry is None or entry.holder is None or entry.committed.done():
            raise TransferError(f"transfer {transfer_id} is not open.")
        self._blocks.remember(entry.holder, entry.holder.num_tokens)
        entry.committed_s = self._loop.time()
        entry.committed.set_result(None)
        if not entry.is_claimed:
            self._expire_later(entry)
        return 0

    def abort(self, transfer_id: str, reason: str) -> None:
        """See :class:`KVSink`. A request that waits for the transfer hears the reason."""
        entry = self._imports.get(transfer_id)
        if entry is None or entry.committed.done():
            return
        entry.committed.set_exception(TransferError(f"The KV transfer broke off: {reason}"))
        entry.committed.exception()  # nobody may ever ask, which is no fault
        self.release(entry)
        if entry.is_claimed:
            self._drop(entry)
        else:
            self._expire_later(entry)

    async def claim(self, transfer_id: str) -> Import:
        """Waits until the transfer is committed; then the caller owns it and must :meth:`release` it.

        Raises:
            TransferError: it failed, or did not complete in time.
        """
        entry = self._entry(transfer_id)
        if entry.is_claimed:
            raise TransferError(f"transfer {transfer_id} has been claimed already.")
        entry.is_claimed = True
        try:
            if not entry.committed.done():
                await asyncio.wait_for(asyncio.shield(entry.committed), self._claim_timeout_s)
            entry.committed.result()
        except BaseException as error:
            self._forget(entry)
            if isinstance(error, TimeoutError):
                waited = f"{self._claim_timeout_s:g} s"
                raise TransferError(f"transfer {transfer_id} brought nothing within {waited}.") from None
            raise
        self._drop(entry)
        return entry

    def release(self, entry: Import) -> None:
        """Gives back what no request has taken over."""
        holder, entry.holder = entry.holder, None
        if holder is not None:
            self._blocks.free(holder)
            self._engine.wake()
            self.retry_soon()

    def hand_over(self, entry: Import, request: Request) -> None:
        """The blocks now belong to ``request``, which starts where its KV ends."""
        holder, entry.holder = entry.holder, None
        if holder is None:
            raise RuntimeError(f"transfer {entry.transfer_id} holds no blocks")
        self._blocks.hand_over(holder, request)

    def _entry(self, transfer_id: str) -> Import:
        entry = self._imports.get(transfer_id)
        if entry is None:
            entry = self._imports[transfer_id] = Import(transfer_id, self._loop.create_future())
        return entry

    def _forget(self, entry: Import) -> None:
        self._drop(entry)
        entry.committed.cancel()
        self.release(entry)

    def _drop(self, entry: Import) -> None:
        if entry.expiry is not None:
            entry.expiry.cancel()
        if self._imports.get(entry.transfer_id) is entry:
            del self._imports[entry.transfer_id]

    def _expire_later(self, entry: Import) -> None:
        def expire() -> None:
            if not entry.is_claimed:
                self._forget(entry)

        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.expiry = self._loop.call_later(self._claim_timeout_s, expire)
