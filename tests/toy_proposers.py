"""A proposer that knows the answers, and drafts them correctly, wrongly or too long, as a test configures it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from baton.core.drafts import ROOT, Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from decode_worker.speculation.method import Outlook
from tests.tiny_models import VOCAB_SIZE

STYLES = ("right", "half right", "wrong", "random", "too long", "sometimes", "silent")


@dataclass(slots=True)
class Oracle:
    """Implements :class:`baton.engine.contracts.Proposer`, and :class:`decode_worker.speculation.method.DraftMethod`.

    Attributes:
        truth: whole output of each request by id.
        style: one of :data:`STYLES`.
        shape: chain or tree.
    """

    truth: Mapping[str, Sequence[int]]
    style: str
    shape: str = "chain"
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    results: list[VerifyResult] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    @property
    def num_accepted(self) -> int:
        return sum(len(result.accepted) for result in self.results)

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        drafts = {}
        for sequence in plan:
            request = sequence.request
            limit = room.get(request.request_id, 0)
            coming = list(self.truth[request.request_id][len(request.output_token_ids) :])
            if limit and (chain := self._chain(coming, limit)):
                drafts[request.request_id] = self._draft(chain, limit)
        return drafts

    def _draft(self, chain: list[int], limit: int) -> Draft:
        """The chain, or a tree in which the chain is one branch and the other branches are wrong."""
        if self.shape == "chain":
            return Draft(tuple(chain))
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for token in chain:
            if len(tokens) + 2 > limit:
                break
            siblings = [token, (token + 1) % VOCAB_SIZE]
            self.chance.shuffle(siblings)
            places = {}
            for sibling in siblings:
                places[sibling] = len(tokens)
                tokens.append(sibling)
                parents.append(parent)
            parent = places[token]
        return Draft(tuple(tokens), tuple(parents))

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook | None:
        return None

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Does nothing: hidden states are not used."""

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

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
