"""Keeps, for each request, the hidden state from which Medusa heads guess: the newest one of the target.

tokens           t0  t1  t2  t3          t3 was sampled from h2 and has no hidden state yet
hidden states    h0  h1  h2              head i guesses token 4 + i from h2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.batch.hidden_states import HiddenStates
from baton.engine.contracts import VerifyResult
from baton.engine.device.uploads import upload_ints, upload_numbers
from baton.engine.draft.medusa.heads import MedusaHeads
from baton.engine.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest hidden state of a request.

    Attributes:
        hidden: ``[hidden_size]``
        num_tokens: tokens of the request while this is its newest state.
    """

    hidden: torch.Tensor
    num_tokens: int


class MedusaState:
    """Implements :class:`baton.engine.draft.network.DraftState`. There is no draft KV.

    Args:
        heads: the heads that read the states.
        runner: runner of the target, built with ``heads`` as its draft.

    Raises:
        ValueError: the runner was built without this draft.
    """

    def __init__(self, heads: MedusaHeads, runner: ModelRunner) -> None:
        if runner.features is None or runner.spec.draft_fingerprint != heads.fingerprint():
            raise ValueError("the runner was built without this draft")
        self.heads = heads
        self._features: HiddenStates = runner.features
        self._device = runner.device
        self._newest: dict[str, _Newest] = {}

    def hidden(self, request: Request) -> torch.Tensor | None:
        """``[hidden_size]``, or ``None`` when the state of the request's second-to-last token is not known."""
        newest = self._newest.get(request.request_id)
        return None if newest is None or newest.num_tokens != request.num_tokens else newest.hidden

    @torch.inference_mode()
    def computed(self, batch: ForwardBatch, results: Mapping[str, VerifyResult]) -> None:
        """Records the state from which each new token was sampled."""
        features = self._features.take()
        rows: list[int] = []
        kept: list[tuple[str, int]] = []
        for sequence, first in zip(batch.sequences, batch.starts, strict=True):
            request = sequence.request
            result = results.get(request.request_id)
            if result is None:
                continue
            if result.next_token is None:
                self.release(request.request_id)
                continue
            rows.append(first + sequence.num_tokens + (result.nodes[-1] if result.nodes else -1))
            kept.append((request.request_id, request.num_tokens + len(result.token_ids)))
        if rows:
            # Copied, so that a state does not keep all features of its step alive.
            hidden = features.index_select(0, upload_ints(rows, features.device)).to(self.heads.dtype)
            for (request_id, num_tokens), own in zip(kept, hidden, strict=True):
                self._newest[request_id] = _Newest(own, num_tokens)

    def keep(self, num_rows: int | None) -> None:
        """Does nothing: there is no KV to save."""

    def flush(self, request_id: str) -> None:
        """Does nothing: there is no KV to write."""

    def release(self, request_id: str) -> None:
        """Forgets a request."""
        self._newest.pop(request_id, None)

    def export_state(self, request_id: str) -> bytes:
        """The newest hidden state; empty if there is none."""
        newest = self._newest.get(request_id)
        if newest is None:
            return b""
        return bytes(newest.hidden.contiguous().view(torch.uint8).cpu().numpy())

    def adopt(self, request: Request, state: bytes | None, first_new: int = 0) -> None:
        """Implements ``DraftState.adopt``. Without a state, the first draft comes one step later."""
        if not state:
            return
        hidden = upload_numbers(state, self.heads.hidden_size, self.heads.dtype, self._device)
        self._newest[request.request_id] = _Newest(hidden, request.num_computed_tokens + 1)
