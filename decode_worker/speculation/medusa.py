"""Medusa heads as a method: all guesses from one hidden state, verified as a tree (Cai et al., arXiv 2401.10774).

Head i guesses the token at depth i, whatever the tokens before it turn out to be; so the candidates are the product of
the heads' likeliest tokens. Which of them are worth a place is decided for each request by how often guesses of that
head, that rank and about that probability have been right (section 2.3.3, with probabilities besides the ranks).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.device.downloads import fetch
from baton.engine.draft.medusa.heads import MAX_RANKS
from baton.engine.draft.medusa.medusa_state import MedusaState
from decode_worker.speculation.acceptance import AcceptanceTracker, kind_of
from decode_worker.speculation.certainty import bucket_of, prior_of
from decode_worker.speculation.draft_length import DraftPasses, Outlook
from decode_worker.speculation.method import DraftMethod
from decode_worker.speculation.tree import best_choices, is_prefix, static_tree, tried

# Of one pass, before anything was seen.
_PRIOR_ACCEPTED = 0.8
_PRIOR_NODES = 6.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """Guesses that are alike, and so are accepted alike."""

    head: int
    rank: int
    bucket: int
    is_greedy: bool


class MedusaProposer(DraftMethod):
    """Implements :class:`~.draft_length.NetworkProposer` with trees, or chains where they promise as much.

    Args:
        state: of the heads that guess.
        passes: keeps account of what a pass of the heads costs.
    """

    def __init__(self, state: MedusaState, passes: DraftPasses) -> None:
        self._state = state
        self._heads = state.heads
        self._passes = passes
        self._acceptance = AcceptanceTracker()
        self._worth = AcceptanceTracker()
        self._drafts: dict[str, Draft] = {}
        self._kinds: dict[str, list[_Kind]] = {}

    @torch.inference_mode()
    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts for the sequences whose newest hidden state is known; the others get theirs a step later."""
        known = [
            (sequence.request, hidden)
            for sequence in plan
            if sequence.request.request_id in room and (hidden := self._state.hidden(sequence.request)) is not None
        ]
        if not known:
            return {}
        started_s = time.monotonic()
        logits = self._heads(torch.stack([hidden for _, hidden in known]))
        probs, columns = torch.softmax(logits.float(), dim=-1).topk(min(MAX_RANKS, logits.shape[-1]), dim=-1)
        # [num_heads, num_requests, num_ranks] → by request
        token_ids, certainties = fetch(self._heads.to_target_ids(columns).transpose(0, 1), probs.transpose(0, 1))
        self._kinds, self._drafts = {}, {}
        drafts: dict[str, Draft] = {}
        for (request, _), tokens, own in zip(known, token_ids, certainties, strict=True):
            draft = self._tree(request, tokens, own, room[request.request_id])
            if len(draft):
                drafts[request.request_id] = draft
        self._passes.record(len(known), (time.monotonic() - started_s) * 1e3)
        self._drafts = drafts
        return drafts

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook:
        """All guesses come from one pass."""
        gains = {
            request.request_id: (self._worth.estimate(("accepted", kind_of(request)), _PRIOR_ACCEPTED),)
            for request in requests
        }
        return Outlook(gains, self._worth.estimate("nodes", _PRIOR_NODES))

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        self._state.computed(batch, results)

    def observe(self, result: VerifyResult) -> None:
        """Of the nodes only those count whose parent is right: the target chose among them, or none of them."""
        request = result.sequence.request
        draft = self._drafts.get(request.request_id)
        if draft is None:
            return
        kinds = self._kinds[request.request_id]
        for node, is_right in (pair for level in tried(draft, result.token_ids) for pair in level):
            self._acceptance.record(kinds[node], prior_of(kinds[node].bucket), float(is_right))
        if is_prefix(result.sequence.draft, draft):  # what a drafting decision brings is what is verified of it
            self._worth.record(("accepted", kind_of(request)), _PRIOR_ACCEPTED, len(result.accepted))
            self._worth.record("nodes", _PRIOR_NODES, result.num_drafted)

    def release(self, request_id: str) -> None:
        self._state.release(request_id)
        self._kinds.pop(request_id, None)
        self._drafts.pop(request_id, None)

    def _tree(
        self,
        request: Request,
        token_ids: Sequence[Sequence[int]],
        certainties: Sequence[Sequence[float]],
        room: int,
    ) -> Draft:
        """The most promising nodes, best first.

        Args:
            token_ids, certainties: of each head its likeliest tokens, and what it thinks of them.
        """
        kinds = [
            [_Kind(head, rank, bucket_of(own), request.params.is_greedy) for rank, own in enumerate(row)]
            for head, row in enumerate(certainties)
        ]
        accuracies = [
            _at_most_one([self._acceptance.estimate(kind, prior_of(kind.bucket)) for kind in row]) for row in kinds
        ]
        choices = best_choices(accuracies, room)
        if not choices:
            return Draft()
        self._kinds[request.request_id] = [kinds[len(path) - 1][path[-1]] for path in choices]
        return static_tree(choices).draft(token_ids, accuracies)


def _at_most_one(accuracies: Sequence[float]) -> list[float]:
    """Only one of them can be right."""
    scale = max(1.0, sum(accuracies))
    return [accuracy / scale for accuracy in accuracies]
