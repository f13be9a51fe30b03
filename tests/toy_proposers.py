"""A proposer that knows the answers, and gives them, spoils them or goes on too long as a test wants."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.scheduler import ScheduledSequence
from engine.verification import DraftProposal, VerifyResult
from tests.tiny_models import VOCAB_SIZE

STYLES = ("right", "half right", "wrong", "random", "too long", "sometimes", "silent")


@dataclass(slots=True)
class Oracle:
    """Implements :class:`engine.verification.Proposer`.

    Attributes:
        truth: each request's whole output, by its id.
        style: one of :data:`STYLES`.
    """

    truth: Mapping[str, Sequence[int]]
    style: str
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    results: list[VerifyResult] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    @property
    def num_accepted(self) -> int:
        return sum(len(result.accepted) for result in self.results)

    def propose(self, plan: Sequence[ScheduledSequence], max_draft_tokens: int) -> dict[str, DraftProposal]:
        proposals = {}
        for sequence in plan:
            request = sequence.request
            chain = self._chain(list(self.truth[request.request_id][len(request.output_token_ids) :]), max_draft_tokens)
            if chain:
                proposals[request.request_id] = DraftProposal(request.request_id, tuple(chain))
        return proposals

    def _chain(self, coming: list[int], limit: int) -> list[int]:
        wrong = [(token + 1) % VOCAB_SIZE for token in coming]
        if self.style == "right":
            return coming[:limit]
        if self.style == "half right":
            return [*coming[:2], *wrong[2:]][:limit]
        if self.style == "wrong":
            return wrong[:limit]
        if self.style == "random":
            good = self.chance.randint(0, limit)
            return [*coming[:good], *wrong[good:]][: self.chance.randint(0, limit)]
        if self.style == "too long":  # beyond the end of the answer, and more than was asked for
            return [*coming, *([7] * limit)]
        if self.style == "sometimes":
            return coming[:limit] if self.chance.random() < 0.5 else []
        return []

    def observe(self, result: VerifyResult) -> None:
        self.results.append(result)

    def observe_step(self, num_tokens: int, ms: float) -> None:
        """Costs do not matter to a toy."""

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
