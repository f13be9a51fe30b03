"""The receiver's transfers: which have begun, which are complete, and which a request has claimed.

A transfer's blocks belong to its import until the request claims them. If anything fails before that, they are freed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.core.errors import TransferError
from baton.core.logs import RequestLog
from baton.core.request import Request
from baton.core.request_ids import request_id_of_call

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingImport:
    """One transfer.

    Attributes:
        committed: resolves when the KV is complete, or fails with the error that ended the transfer.
        holder: a request that is never scheduled and owns the reserved blocks.
        committed_s: when the KV was complete, on the monotonic clock.
        num_bytes: number of bytes that have arrived.
        claimed: whether a request has claimed the KV.
        expiry: timer that forgets the transfer if it is not claimed in time.
    """

    transfer_id: str
    committed: asyncio.Future[None]
    holder: Request | None = None
    committed_s: float = 0.0
    num_bytes: int = 0
    claimed: bool = False
    expiry: asyncio.TimerHandle | None = None

    @property
    def failed(self) -> bool:
        return self.committed.done() and (self.committed.cancelled() or self.committed.exception() is not None)


ImportT = TypeVar("ImportT", bound=PendingImport)


class PendingImports(Generic[ImportT]):
    """All transfers of a receiver by id.

    Args:
        make: creates an import from a transfer id and its future.
        release: frees the blocks of an import that no request took over.
        claim_timeout_s: how long committed KV waits for its request, and a request for a transfer without progress.
    """

    def __init__(
        self,
        make: Callable[[str, asyncio.Future[None]], ImportT],
        release: Callable[[ImportT], None],
        claim_timeout_s: float,
    ) -> None:
        self._make = make
        self._release = release
        self._claim_timeout_s = claim_timeout_s
        self._entries: dict[str, ImportT] = {}

    @property
    def all(self) -> Iterable[ImportT]:
        """Transfers that are unclaimed, or whose claim still waits."""
        return self._entries.values()

    def get(self, transfer_id: str) -> ImportT | None:
        return self._entries.get(transfer_id)

    def entry(self, transfer_id: str) -> ImportT:
        """The transfer, created if necessary: its sender and its request may arrive in either order."""
        entry = self._entries.get(transfer_id)
        if entry is None:
            entry = self._make(transfer_id, asyncio.get_running_loop().create_future())
            self._entries[transfer_id] = entry
        return entry

    def commit(self, entry: ImportT, now_s: float) -> None:
        """Marks the KV as complete."""
        entry.committed_s = now_s
        entry.committed.set_result(None)
        if not entry.claimed:
            self._expire_later(entry, "no request claimed the KV")

    def fail(self, entry: ImportT, reason: str) -> None:
        """Frees the blocks and keeps the reason for a request that may still claim the KV."""
        if entry.committed.done():  # committed KV stays valid without its sender
            return
        entry.committed.set_exception(TransferError(f"The KV transfer failed: {reason}"))
        entry.committed.exception()  # marks it as retrieved: it may never be claimed
        self._release(entry)
        if entry.claimed:
            self._drop(entry)
        else:
            self._expire_later(entry, reason)

    async def claim(self, transfer_id: str) -> ImportT:
        """Waits until the transfer is committed. The caller then owns it and must release it.

        Raises:
            TransferError: the transfer failed, or did not complete in time.
        """
        entry = self.entry(transfer_id)
        if entry.claimed:
            raise TransferError(f"transfer {transfer_id} has already been claimed.")
        entry.claimed = True
        try:
            await self._wait_for_commit(entry)
        except BaseException as error:
            self._forget(entry)
            if isinstance(error, TimeoutError):
                raise TransferError(
                    f"transfer {transfer_id} made no progress for {self._claim_timeout_s:g} s."
                ) from None
            raise
        self._drop(entry)
        return entry

    def abandon(self, transfer_id: str) -> None:
        """Frees the blocks of a transfer that will not be claimed. A claimed transfer stays with its request."""
        entry = self._entries.get(transfer_id)
        if entry is not None and not entry.claimed:
            self._forget(entry)

    async def _wait_for_commit(self, entry: ImportT) -> None:
        """Waits for the commit. Raises TimeoutError when no bytes arrive any more; a slow link is tolerated."""
        num_bytes = -1
        while num_bytes < entry.num_bytes:
            num_bytes = entry.num_bytes
            try:
                async with asyncio.timeout(self._claim_timeout_s):
                    await asyncio.shield(entry.committed)
                    return
            except TimeoutError:
                continue
        raise TimeoutError

    def _forget(self, entry: ImportT) -> None:
        """Releases the transfer. A sender that still sends gets an error for its next part."""
        self._drop(entry)
        entry.committed.cancel()
        self._release(entry)

    def _drop(self, entry: ImportT) -> None:
        if entry.expiry is not None:
            entry.expiry.cancel()
        if self._entries.get(entry.transfer_id) is entry:
            del self._entries[entry.transfer_id]

    def _expire_later(self, entry: ImportT, reason: str) -> None:
        def expire() -> None:
            if not entry.claimed:
                log = RequestLog(logger, request_id_of_call(entry.transfer_id))
                log.info("unclaimed KV was discarded: %s", reason)
                self._forget(entry)

        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.expiry = asyncio.get_running_loop().call_later(self._claim_timeout_s, expire)
