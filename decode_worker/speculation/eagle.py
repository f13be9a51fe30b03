"""EAGLE heads as a method: the head goes on where the target's own hidden states end, a token a pass.

Li et al., arXiv 2401.15077 (EAGLE), 2406.16858 (EAGLE-2), 2503.01840 (EAGLE-3). The same loop serves all versions;
what differs between them is in the head.
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
from decode_worker.speculation.draft_length import DraftPasses, Outlook
from decode_worker.speculation.method import DraftMethod


class EagleProposer(DraftMethod):
    """Implements :class:`~.draft_length.NetworkProposer` with chains of the head's guesses.

    Args:
        state: of the head that guesses.
        passes: says when a further pass of the head no longer pays.
        draws: see :class:`~.chains.ChainDrafter`.
    """

    def __init__(self, state: FeatureState, passes: DraftPasses, *, draws: bool = False) -> None:
        self._state = state
        head = state.head
        columns = torch.arange(head.draft_vocab_size, device=next(head.parameters()).device)
        vocabulary = VocabularyMap(head.to_target_ids(columns), head.settings.target.vocab_size)
        self._drafter = ChainDrafter(vocabulary, passes, draws=draws)

    @torch.inference_mode()
    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts for the sequences whose rows are at hand; the others get theirs a step later."""
        waiting = [
            rows
            for sequence in plan
            if sequence.request.request_id in room
            and (rows := self._state.waiting(sequence.request.request_id)) is not None
            and rows.token_ids
            and sequence.num_tokens == 1  # not those of a request that has to start again
        ]
        if not waiting:
            return {}
        waiting.sort(key=lambda rows: (len(rows.token_ids), -rows.end))
        chains = [Chain(rows.request, room[rows.request.request_id]) for rows in waiting]
        return self._drafter.draft(chains, _HeadPasses(self._state, waiting))

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook:
        return self._drafter.outlook(requests, room)

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        self._state.computed(batch, results)

    def observe(self, result: VerifyResult) -> None:
        self._drafter.observe(result)

    def release(self, request_id: str) -> None:
        self._state.release(request_id)
        self._drafter.release(request_id)


class _HeadPasses:
    """Implements :class:`~.chains.ChainPasses`: from the second pass on the head is fed its own hidden states."""

    def __init__(self, state: FeatureState, waiting: Sequence[WaitingRows]) -> None:
        self._state = state
        self._waiting = list(waiting)
        self._hidden = torch.empty(0)
        self._num_guesses = 0

    def first(self) -> torch.Tensor:
        """All rows that wait, in one pass."""
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
