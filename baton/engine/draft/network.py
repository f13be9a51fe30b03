"""Interface of a draft network's state on a worker, and the handling of a draft's errors. Both roles use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.device.device_errors import is_device_lost, is_out_of_memory


class DraftState(Protocol):
    """A worker's state of a draft network between steps, by request. Use only in the engine's thread."""

    def computed(self, batch: ForwardBatch, results: Mapping[str, VerifyResult]) -> None:
        """Reads a forward of the target; see :meth:`baton.engine.contracts.Proposer.computed`."""
        ...

    def keep(self, num_rows: int | None) -> None:
        """Lets the state fall behind while its method pauses; later drafts may see less.

        Args:
            num_rows: latest tokens of each request that drafts must see at least; ``None`` for all of them.
        """
        ...

    def flush(self, request_id: str) -> None:
        """Brings a request's draft KV up to date before its blocks are freed or sent."""
        ...

    def release(self, request_id: str) -> None:
        """Forgets a request; first brings its draft KV up to date, since its blocks may become another's prefix."""
        ...

    def export_state(self, request_id: str) -> bytes:
        """State that another worker needs to continue the request, besides the draft KV of its blocks."""
        ...

    def adopt(self, request: Request, state: bytes | None, first_new: int = 0) -> None:
        """Takes over a request whose KV was computed on another worker, before its first step here.

        Args:
            request: has the KV of its prompt in its blocks, and its first token.
            state: from :meth:`export_state` on the other worker; ``None`` when no draft KV came with the target's.
            first_new: first position whose KV was received; earlier positions were cached here.

        Raises:
            ValueError: the state is not one of this network's.
        """
        ...


class DraftFaults:
    """Separates errors that the engine must see from those for which a draft is switched off.

    The engine ends when the device is lost. When a step runs out of memory, the engine frees some and retries the step,
    so a draft is switched off only if it runs out of memory twice in a row.
    """

    def __init__(self) -> None:
        self._lacked_memory: set[str] = set()

    def is_for_engine(self, name: str, error: Exception, *, in_step: bool) -> bool:
        """Whether an error of the draft ``name`` must be raised.

        Args:
            in_step: whether the error occurred in a step that the engine retries.
        """
        if is_device_lost(error):
            return True
        if not in_step or not is_out_of_memory(error) or name in self._lacked_memory:
            return False
        self._lacked_memory.add(name)
        return True

    def went_well(self, name: str) -> None:
        """Ends a row of failures. Call it when the draft's part of a step has succeeded."""
        self._lacked_memory.discard(name)
