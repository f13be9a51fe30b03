"""What both roles need for a draft network: its state beside the target's, and whose fault an error is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.device.device_errors import is_device_lost, is_out_of_memory


class DraftState(Protocol):
    """What a worker keeps for a network between steps, request by request. Used from the engine's thread only."""

    def computed(self, batch: ForwardBatch, results: Mapping[str, VerifyResult]) -> None:
        """Sees a forward of the target; see :meth:`baton.engine.contracts.Proposer.computed`."""
        ...

    def keep(self, num_rows: int | None) -> None:
        """Lets a state fall behind while its method rests: later drafts may see less.

        Args:
            num_rows: latest tokens of each request that drafts must see at least; ``None`` for all of them.
        """
        ...

    def flush(self, request_id: str) -> None:
        """Brings a request's draft KV up to date before its blocks are given away or sent."""
        ...

    def release(self, request_id: str) -> None:
        """Forgets a request, whose blocks may stay as another's prefix: its draft KV is brought up to date first."""
        ...

    def export_state(self, request_id: str) -> bytes:
        """State that another worker needs to go on with the request, besides the draft KV of its blocks."""
        ...

    def adopt(self, request: Request, state: bytes | None, first_new: int = 0) -> None:
        """Takes over a request whose KV was computed elsewhere, before its first step here.

        Args:
            request: has the KV of its prompt in its blocks, and its first token.
            state: from :meth:`export_state` there; None when no draft KV came with the target's.
            first_new: first position whose KV came; that of the ones before was here.

        Raises:
            ValueError: the state is not one of this network's.
        """
        ...


class DraftFaults:
    """Tells errors that the engine must see from those for which a draft is switched off.

    The engine ends when the device is lost. When a step runs out of memory, the engine frees some and tries the step
    again, so a draft is at fault only if it runs out of memory twice in a row.
    """

    def __init__(self) -> None:
        self._lacked_memory: set[str] = set()

    def is_for_engine(self, name: str, error: Exception, *, in_step: bool) -> bool:
        """Whether an error of the draft ``name`` must be raised.

        Args:
            in_step: the engine tries the step again in which the error occurred.
        """
        if is_device_lost(error):
            return True
        if not in_step or not is_out_of_memory(error) or name in self._lacked_memory:
            return False
        self._lacked_memory.add(name)
        return True

    def went_well(self, name: str) -> None:
        """Ends a row of failures. Call it when the draft's part of a step has worked."""
        self._lacked_memory.discard(name)
