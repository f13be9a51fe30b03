"""What the engine must know of a draft that keeps state of its own beside the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult


class DraftState(Protocol):
    """What a worker keeps for a network between steps, request by request. Used from the engine's thread only."""

    def computed(self, batch: ForwardBatch, results: Mapping[str, VerifyResult]) -> None:
        """Sees a forward of the target; see :meth:`baton.engine.contracts.Proposer.computed`."""
        ...

    def keep(self, num_rows: int | None) -> None:
        """While nobody drafts, a state need not keep up: drafts that come later may see less.

        Args:
            num_rows: of each request, how many of its latest tokens they must see at least; None: all of them.
        """
        ...

    def flush(self, request_id: str) -> None:
        """Brings a request's draft KV up to date before its blocks are given away or sent."""
        ...

    def release(self, request_id: str) -> None:
        """Forgets a request, whose blocks may stay as somebody's prefix: its draft KV is brought up to date first."""
        ...

    def export_state(self, request_id: str) -> bytes:
        """What another worker needs, besides the draft KV of the request's blocks, to go on with the request."""
        ...

    def adopt(self, request: Request, state: bytes | None, first_new: int = 0) -> None:
        """Takes over a request whose KV was computed elsewhere, before its first step here.

        Args:
            request: has the KV of its prompt in its blocks, and its first token.
            state: from :meth:`export_state` there; None when no draft KV came with the target's.
            first_new: first position whose KV came; that of the ones before was here.

        Raises:
            ValueError: the state is none of this network's.
        """
        ...
