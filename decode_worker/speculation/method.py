"""What all speculation methods have in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult


class DraftMethod:
    """The part of :class:`baton.engine.contracts.Proposer` that most methods have no use for."""

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """For methods that read more of a forward than its tokens."""

    def observe_step(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        """The controller keeps account of the target's steps, and :class:`~.draft_length.DraftPasses` of passes."""
