"""EAGLE heads as a method: the head goes on where the target's own hidden states end, a token a pass.

Li et al., arXiv 2401.15077 (EAGLE), 2406.16858 (EAGLE-2), 2503.01840 (EAGLE-3). The same loop serves all versions;
what differs between them is in the head.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from decode_worker.speculation.acceptance import AcceptanceTracker
from decode_worker.speculation.draft_length import DraftPasses
from engine.attention_groups import Span
from engine.batch import ForwardBatch
from engine.draft.feature_state import FeatureState, WaitingRows
from engine.drafts import Draft
from engine.request import Request
from engine.scheduler import ScheduledSequence
from engine.verification import VerifyResult

_PROBABILITY_BUCKETS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
# A head is surer of itself than it is right.
_PRIOR_FACTOR = 0.8
_PRIOR_AT_DEPTH = 0.5


@dataclass(slots=True)
class _Chain:
    """A draft in the making.

    Attributes:
        position: of the next row, behind everything that the target knows.
        keys: of the acceptance estimates that the confidences come from.
    """

    request: Request
    position: int
    first_key: int
    room: int
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)
    survival: float = 1.0


class EagleProposer:
    """Implements :class:`engine.verification.Proposer` with chains of the head's likeliest tokens.

    Args:
        state: of the head that guesses.
        passes: says when a further pass of the head no longer pays.
    """

    def __init__(self, state: FeatureState, passes: DraftPasses) -> None:
        self._state = state
        self._head = state.head
        self._passes = passes
        self._acceptance = AcceptanceTracker()
        self._by_depth = AcceptanceTracker()
        self._keys: dict[str, list[tuple[int, int]]] = {}

    @torch.inference_mode()
    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts for the sequences whose rows are at hand; the others get theirs a step later."""
        waiting = [
            rows
            for sequence in plan
            if sequence.request.request_id in room
            and (rows := self._state.waiting(sequence.request.request_id)) is not None
            and rows.token_ids
        ]
        if not waiting:
            return {}
        waiting.sort(key=lambda rows: (len(rows.token_ids), -rows.end))
        started_s = time.monotonic()
        hidden, logits = self._catch_up(waiting)
        chains = [_Chain(w.request, w.start, w.first_key, room[w.request.request_id]) for w in waiting]
        active = chains
        while True:
            self._extend(active, logits)
            now_s = time.monotonic()
            self._passes.record(len(active), (now_s - started_s) * 1e3)
            started_s = now_s
            going_on = [index for index, chain in enumerate(active) if len(chain.token_ids) < chain.room]
            if not going_on or not self._passes.another([self._next_chance(active[index]) for index in going_on]):
                break
            active = [active[index] for index in going_on]
            hidden, logits = self._pass(active, hidden[going_on])
        self._keys = {chain.request.request_id: chain.keys for chain in chains}
        return {
            chain.request.request_id: Draft(tuple(chain.token_ids), confidences=tuple(chain.confidences))
            for chain in chains
        }

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        self._state.computed(batch, results)

    def observe(self, result: VerifyResult) -> None:
        keys = self._keys.get(result.sequence.request.request_id, [])
        self._acceptance.record_chain(
            min(result.num_drafted, len(keys)),
            len(result.accepted),
            lambda depth: (keys[depth], _prior(keys[depth][1])),
        )
        self._by_depth.record_chain(result.num_drafted, len(result.accepted), lambda depth: (depth, _PRIOR_AT_DEPTH))

    def observe_step(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        """The passes keep account of costs."""

    def release(self, request_id: str) -> None:
        self._state.flush(request_id)
        self._state.release(request_id)
        self._keys.pop(request_id, None)

    def _next_chance(self, chain: _Chain) -> float:
        """That one more draft would be accepted, before it is made."""
        return chain.survival * self._by_depth.estimate(len(chain.token_ids), _PRIOR_AT_DEPTH)

    def _catch_up(self, waiting: Sequence[WaitingRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows that wait, in one pass. Of each sequence the last row's output and logits."""
        rows = self._state.rows_of(waiting)
        token_ids = torch.tensor([token for own in waiting for token in own.token_ids])
        hidden = torch.cat([own.hidden for own in waiting])
        fed, normed = self._head(token_ids.to(hidden.device), hidden, rows.positions, self._state.attend(rows))
        logits = self._head.logits(normed[rows.last])
        for own in waiting:
            self._state.mark_seen(own, len(own.token_ids))
        return fed[rows.last], logits

    def _pass(self, chains: Sequence[_Chain], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feeds each chain's last guess to the head, together with the head's own hidden state."""
        spans = []
        for chain in chains:
            spans.append(Span(chain.request.block_ids, chain.position, 1, first_key=chain.first_key))
            chain.position += 1
        rows = self._state.build_rows(spans)
        token_ids = torch.tensor([chain.token_ids[-1] for chain in chains]).to(hidden.device)
        fed, normed = self._head(token_ids, hidden, rows.positions, self._state.attend(rows))
        return fed, self._head.logits(normed)

    def _extend(self, chains: Sequence[_Chain], logits: torch.Tensor) -> None:
        """Adds the likeliest token to each chain, with what such probabilities have been worth so far."""
        best, choice = torch.softmax(logits.float(), dim=-1).max(dim=-1)
        token_ids = self._head.to_target_ids(choice).tolist()
        for chain, token, probability in zip(chains, token_ids, best.tolist(), strict=True):
            key = (min(len(chain.token_ids), 4), _bucket(probability))
            chain.keys.append(key)
            chain.token_ids.append(token)
            chain.confidences.append(self._acceptance.estimate(key, _prior(key[1])))
            chain.survival *= chain.confidences[-1]


def _bucket(probability: float) -> int:
    return sum(probability >= limit for limit in _PROBABILITY_BUCKETS)


def _prior(bucket: int) -> float:
    edges = (0.0, *_PROBABILITY_BUCKETS, 1.0)
    return _PRIOR_FACTOR * (edges[bucket] + edges[bucket + 1]) / 2
