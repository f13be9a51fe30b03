"""A smaller language model as a method: it reads the target's tokens and continues them, one token per pass.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.draft.model.token_state import TokenState
from decode_worker.speculation.chains import Chain, ChainDrafter, VocabularyMap
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.method import Outlook

# Number of missing tokens that a request's first pass may also read; longer gaps are closed before.
_MAX_MISSING = 16


class DraftModelProposer:
    """A :class:`~.method.DraftMethod` that proposes chains of the draft model's guesses.

    Args:
        state: state of the draft model.
        passes: decides when a further pass of the draft no longer pays.
        draws: see :class:`~.chains.ChainDrafter`.
        catch_up_rows: tokens per step, over all requests, that the draft reads to close gaps: a prompt that arrived
            without draft KV, or tokens generated while the method was not used. Until its gap is closed, a request gets
            no draft.
    """

    def __init__(
        self, state: TokenState, passes: DraftPasses, *, draws: bool = False, catch_up_rows: int = 256
    ) -> None:
        self._state = state
        self._catch_up_rows = catch_up_rows
        self._max_positions = state.draft.max_positions
        columns = torch.arange(state.draft.num_shared_tokens, device=state.draft.loaded.model.device)
        self._drafter = ChainDrafter(VocabularyMap(columns, state.num_target_ids), passes, draws=draws)

    @torch.inference_mode()
    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts for the sequences that compute only their last token."""
        limits = {
            sequence.request: limit
            for sequence in plan
            if sequence.num_tokens == 1 and (limit := self._limit(sequence.request, room)) > 0
        }
        behind = [request for request in limits if self._state.num_missing(request) > _MAX_MISSING]
        self._state.catch_up(behind, self._catch_up_rows)
        ready = [request for request in limits if self._state.num_missing(request) <= _MAX_MISSING]
        if not ready:
            return {}
        ready.sort(key=lambda request: (self._state.num_missing(request), -request.num_tokens))
        chains = [Chain(request, limits[request]) for request in ready]
        return self._drafter.draft(chains, _ModelPasses(self._state, ready))

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook:
        return self._drafter.outlook(requests, room)

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        self._state.computed(batch, results)

    def observe(self, result: VerifyResult) -> None:
        self._drafter.observe(result)

    def release(self, request_id: str) -> None:
        self._state.release(request_id)
        self._drafter.release(request_id)

    def _limit(self, request: Request, room: Mapping[str, int]) -> int:
        """The number of tokens to draft, limited by the draft's own context length."""
        return min(room.get(request.request_id, 0), self._max_positions - request.num_tokens)


class _ModelPasses:
    """Implements :class:`~.chains.ChainPasses`."""

    def __init__(self, state: TokenState, requests: Sequence[Request]) -> None:
        self._state = state
        self._requests = list(requests)

    def first(self) -> torch.Tensor:
        return self._state.start(self._requests)

    def next(self, kept: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        self._requests = [self._requests[index] for index in kept]
        return self._state.extend(self._requests, token_ids)
