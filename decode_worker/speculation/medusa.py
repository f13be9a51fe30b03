"""Medusa heads as a method: all guesses from one hidden state, verified as a tree (Cai et al., arXiv 2401.10774).

Head i guesses the token at depth i independently of the tokens before it, so the candidates are the product of the
heads' likeliest tokens. Each request's tree has the candidates with the best chances, estimated by how often guesses of
the same head, rank and approximate probability have been right (section 2.3.3, with probabilities besides the ranks).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.core.drafts import ROOT, Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.device.downloads import fetch
from baton.engine.draft.medusa.heads import MAX_RANKS
from baton.engine.draft.medusa.medusa_state import MedusaState
from decode_worker.speculation.acceptance import AcceptanceTracker, bucket_of, kind_of, prior_of
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.method import Outlook
from decode_worker.speculation.tree import is_prefix, tree_draft, tried

# Accepted tokens of one pass, before any measurement.
_PRIOR_ACCEPTED = 0.8
_PRIOR_NODES = 6.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class of similar guesses, which share an acceptance estimate."""

    head: int
    rank: int
    bucket: int
    is_greedy: bool


class MedusaProposer:
    """A :class:`~.method.DraftMethod` that proposes trees, or chains where these promise as much.

    Args:
        state: state of the heads.
        passes: records the cost of the heads' passes.
    """

    def __init__(self, state: MedusaState, passes: DraftPasses) -> None:
        self._state = state
        self._heads = state.heads
        self._passes = passes
        self._acceptance = AcceptanceTracker()
        self._gains = AcceptanceTracker()
        self._drafts: dict[str, Draft] = {}
        self._kinds: dict[str, list[_Kind]] = {}

    @torch.inference_mode()
    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts for the sequences whose newest hidden state is known; others get their draft one step later."""
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
        """The expected accepted tokens; all guesses come from one pass."""
        gains = {
            request.request_id: (self._gains.estimate(("accepted", kind_of(request)), _PRIOR_ACCEPTED),)
            for request in requests
        }
        return Outlook(gains, self._gains.estimate("nodes", _PRIOR_NODES))

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        self._state.computed(batch, results)

    def observe(self, result: VerifyResult) -> None:
        """Learns from the nodes whose parent is right: the target chose one of them, or none."""
        request = result.sequence.request
        draft = self._drafts.get(request.request_id)
        if draft is None:
            return
        kinds = self._kinds[request.request_id]
        for node, is_right in (pair for level in tried(draft, result.token_ids) for pair in level):
            self._acceptance.record(kinds[node], prior_of(kinds[node].bucket), float(is_right))
        if is_prefix(result.sequence.draft, draft):  # the outlook is for the verified part of a draft
            self._gains.record(("accepted", kind_of(request)), _PRIOR_ACCEPTED, len(result.accepted))
            self._gains.record("nodes", _PRIOR_NODES, result.num_drafted)

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
            token_ids, certainties: for each head, its likeliest tokens and their probabilities.
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
        nodes = {path: node for node, path in enumerate(choices)}
        places = [(len(path) - 1, path[-1]) for path in choices]
        self._kinds[request.request_id] = [kinds[head][rank] for head, rank in places]
        return tree_draft(
            [token_ids[head][rank] for head, rank in places],
            [nodes.get(path[:-1], ROOT) for path in choices],
            [accuracies[head][rank] for head, rank in places],
        )


def best_choices(accuracies: Sequence[Sequence[float]], num_nodes: int) -> list[tuple[int, ...]]:
    """The tree with the most accepted tokens to expect (arXiv 2401.10774, section 2.3.3), best nodes first.

    Args:
        accuracies: for each depth, how often its likeliest token, its second likeliest and so on are right. Those of
            one depth add up to at most 1.
        num_nodes: nodes of the tree; fewer come back when there are no more.

    Returns:
        Each node as the path of ranks that leads to it, parents before children.
    """
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    found: list[tuple[int, ...]] = []
    while waiting and len(found) <= num_nodes:
        chance, path = heapq.heappop(waiting)
        found.append(path)
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if accuracy > 0:
                    heapq.heappush(waiting, (chance * accuracy, (*path, rank)))
    return found[1:]


def _at_most_one(accuracies: Sequence[float]) -> list[float]:
    """Scales accuracies to a sum of at most 1, because only one guess can be right."""
    scale = max(1.0, sum(accuracies))
    return [accuracy / scale for accuracy in accuracies]
