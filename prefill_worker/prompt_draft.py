"""Runs the draft over prompts, so that a decode worker can speculate from its first step on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.draft.network import DraftFaults, DraftState

T = TypeVar("T")
logger = logging.getLogger(__name__)

_NAME = "draft"


class PromptDraft:
    """Implements ``Proposer`` without proposing anything. Use it in the engine's thread only.

    A draft that raises is disabled: prompts are then sent without its KV, and no request fails because of it.
    """

    def __init__(self, state: DraftState) -> None:
        self._state: DraftState | None = state
        self._faults = DraftFaults()
        self.num_failures = 0

    def export_state(self, request_id: str) -> bytes | None:
        """What the decode worker needs besides the draft's KV; ``None`` when that KV is unusable."""
        return self._guarded(lambda state: state.export_state(request_id))

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        return {}

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Writes the draft's KV for the computed positions; the hand-off sends it after this."""

        def write(state: DraftState) -> None:
            state.computed(batch, results)
            for request_id in results:
                state.flush(request_id)

        self._guarded(write, in_step=True)

    def observe(self, result: VerifyResult) -> None:
        """Does nothing: there are no drafts to learn from."""

    def release(self, request_id: str) -> None:
        self._guarded(lambda state: state.release(request_id))

    def _guarded(self, work: Callable[[DraftState], T], *, in_step: bool = False) -> T | None:
        """Runs ``work`` unless the draft is disabled, and disables it when ``work`` fails.

        Args:
            in_step: the engine retries the step if ``work`` runs out of memory.

        Raises:
            Exception: see :class:`DraftFaults`.
        """
        if self._state is None:
            return None
        try:
            result = work(self._state)
        except Exception as error:
            if self._faults.is_for_engine(_NAME, error, in_step=in_step):
                raise
            logger.exception("the draft failed and is disabled")
            self.num_failures += 1
            self._state = None
            return None
        if in_step:
            self._faults.went_well(_NAME)
        return result
