"""EAGLE heads as a method: the head continues from the target's own hidden states, one token per pass.

Li et al., arXiv 2401.15077 (EAGLE), 2406.16858 (EAGLE-2), 2503.01840 (EAGLE-3). The same loop serves all versions,
which differ in the head: see ``baton.engine.draft.eagle``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.attention_groups import Span
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.device.uploads import take_rows
from baton.engine.draft.eagle.feature_state import FeatureState, WaitingRows
from decode_worker.speculation.chains import Chain, ChainDrafter, VocabularyMap
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.eagle.tree_drafter import TreeDrafter, TreeSettings
from decode_worker.speculation.method import Outlook


class EagleProposer:
    """A :class:`~.method.DraftMethod` that proposes trees for small batches, and chains for all others.

    Args:
        state: state of the head.
        passes: decides when a further pass of the head no longer pays.
        draws: see :class:`~.chains.ChainDrafter`. Trees are never drawn.
        trees: shape of the trees, and largest batch for them; ``None`` means chains only.
    """

    def __init__(
        self, state: FeatureState, passes: DraftPasses, *, draws: bool = False, trees: TreeSettings | None = None
    ) -> None:
        self._state = state
        head = state.head
        columns = torch.arange(head.draft_vocab_size, device=next(head.parameters()).device)
        vocabulary = VocabularyMap(head.to_target_ids(columns), head.settings.target.vocab_size)
        self._chains = ChainDrafter(vocabulary, passes, draws=draws)
        self._trees = None if trees is None else TreeDrafter(state, vocabulary, passes, trees)
        self._drafter: ChainDrafter | TreeDrafter = self._chains
        self._outlook_from: ChainDrafter | TreeDrafter | None = None

    @torch.inference_mode()
    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts for the sequences whose rows are available; others get their draft one step later."""
        wanting = [sequence for sequence in plan if sequence.request.request_id in room]
        fitting = self._drafter_for(len(wanting))
        # The controller may propose for fewer requests than the outlook covered. These get the promised kind of draft.
        self._drafter = self._chains if self._outlook_from is self._chains else fitting
        self._outlook_from = None
        waiting = [rows for sequence in wanting if (rows := self._rows_at_hand(sequence)) is not None]
        if not waiting:
            return {}
        waiting.sort(key=lambda rows: (len(rows.token_ids), -rows.end))
        room = self._room(self._drafter, room)
        if isinstance(self._drafter, TreeDrafter):
            return self._drafter.draft(waiting, room)
        chains = [Chain(rows.request, room[rows.request.request_id]) for rows in waiting]
        return self._drafter.draft(chains, _HeadPasses(self._state, waiting))

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook:
        drafter = self._outlook_from = self._drafter_for(len(requests))
        return drafter.outlook(requests, self._room(drafter, room))

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        self._state.computed(batch, results)

    def observe(self, result: VerifyResult) -> None:
        self._drafter.observe(result)

    def release(self, request_id: str) -> None:
        self._state.release(request_id)
        self._chains.release(request_id)
        if self._trees is not None:
            self._trees.release(request_id)

    def _drafter_for(self, num_requests: int) -> ChainDrafter | TreeDrafter:
        trees = self._trees
        return self._chains if trees is None or num_requests > trees.settings.max_batch else trees

    def _room(self, drafter: ChainDrafter | TreeDrafter, room: Mapping[str, int]) -> Mapping[str, int]:
        """The room of a drafter; chains are limited to fewer tokens than trees have nodes."""
        if self._trees is None or drafter is self._trees:
            return room
        return {request_id: min(count, self._trees.settings.max_chain) for request_id, count in room.items()}

    def _rows_at_hand(self, sequence: ScheduledSequence) -> WaitingRows | None:
        """The rows up to the last known token; ``None`` if there are none, or the request has to be recomputed."""
        rows = self._state.waiting(sequence.request.request_id)
        return rows if rows is not None and rows.token_ids and sequence.num_tokens == 1 else None


class _HeadPasses:
    """A :class:`~.chains.ChainPasses`: from the second pass on the head reads its own hidden states."""

    def __init__(self, state: FeatureState, waiting: Sequence[WaitingRows]) -> None:
        self._state = state
        self._waiting = list(waiting)
        self._hidden = torch.empty(0)
        self._num_guesses = 0

    def first(self) -> torch.Tensor:
        """Computes all waiting rows in one pass."""
        self._hidden, logits = self._state.catch_up(self._waiting)
        return logits

    def next(self, kept: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        self._waiting = [self._waiting[index] for index in kept]
        spans = [
            Span(rows.request.block_ids, rows.start + self._num_guesses, 1, first_key=rows.first_key)
            for rows in self._waiting
        ]
        self._num_guesses += 1
        hidden = self._hidden if len(kept) == len(self._hidden) else take_rows(self._hidden, kept)
        self._hidden, logits = self._state.go_on(spans, token_ids, hidden)
        return logits
