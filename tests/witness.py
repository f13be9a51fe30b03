"""A witness of what an engine drafts and accepts, for comparisons with the rounds of traced requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from baton.core.drafts import NO_DRAFT, Draft, ScheduledSequence
from baton.core.request import TokenOutput
from baton.core.rounds import Round
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.engine import Engine


class Witness:
    """Stands between an engine and its proposer and verifier.

    Attributes:
        num_trees, num_accepted: how many drafts were trees, and how many drafted tokens were accepted.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.proposer is not None
        self._proposer, self._verifier = engine.proposer, engine.verifier
        engine.proposer = engine.verifier = self
        self._drafts: dict[str, Draft] = {}
        self._seen: dict[str, list[tuple[Draft, VerifyResult]]] = defaultdict(list)
        self.num_trees = self.num_accepted = 0

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        drafts = self._proposer.propose(plan, room)
        self._drafts = {name: draft.first(room.get(name, 0)) for name, draft in drafts.items()}
        return drafts

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        results = self._verifier.verify(batch, logits)
        for result in results:
            name = result.sequence.request.request_id
            draft = self._drafts.get(name, NO_DRAFT)
            self._seen[name].append((draft, result))
            self.num_trees += not draft.is_chain
            self.num_accepted += len(result.accepted)
        return results

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        self._proposer.computed(batch, logits, results)

    def observe(self, result: VerifyResult) -> None:
        self._proposer.observe(result)

    def release(self, request_id: str) -> None:
        self._proposer.release(request_id)

    def check(self, request_id: str, outputs: Iterable[TokenOutput], answer: Sequence[int]) -> list[Round]:
        """Checks that a request's rounds are what happened, and that their tokens are the answer; returns them."""
        rounds = [output.round for output in outputs if output.request_id == request_id and output.round is not None]
        seen = self._seen[request_id]
        assert len(rounds) == len(seen)
        for found, (draft, result) in zip(rounds, seen, strict=True):
            _check_round(found, draft, result)
        assert [token for found in rounds for token in found.token_ids] == list(answer)
        return rounds


def _check_round(found: Round, draft: Draft, result: VerifyResult) -> None:
    assert found.draft == draft.token_ids
    assert found.parents == tuple(draft.parent(node) for node in range(len(draft)))
    assert found.method == draft.method
    assert found.accepted == result.nodes
    assert tuple(found.draft[node] for node in found.accepted) == result.accepted
    assert found.token_ids == result.token_ids[: len(found.token_ids)]
    assert found.draft_s >= 0
    assert found.verify_s > 0
    last = result.nodes[-1] if result.nodes else -1
    own = "plain" if not len(draft) else "recovered" if last in found.parents else "bonus"
    assert found.verdicts == (*("accepted" for _ in result.accepted), own)[: len(found.token_ids)]
