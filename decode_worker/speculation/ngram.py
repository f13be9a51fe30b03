"""Prompt lookup: the tokens that followed the last occurrence of the sequence's last n-gram, in the sequence itself.

Saxena, "Prompt Lookup Decoding", 2023. Fixed n-gram lengths, longest first; ``suffix`` generalises it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.contracts import VerifyResult
from decode_worker.speculation.acceptance import AcceptanceTracker, num_right
from decode_worker.speculation.method import Outlook
from decode_worker.speculation.suffix_automaton import Match, continuation

_NGRAM_LENGTHS = (5, 4, 3, 2)
_PRIOR = 0.5


@dataclass(slots=True)
class _Index:
    """The last end of each n-gram of a sequence, without the n-gram at the sequence's own end."""

    token_ids: list[int] = field(default_factory=list)
    last_end: dict[tuple[int, ...], int] = field(default_factory=dict)
    drafted_with: int = 0
    drafts: tuple[int, ...] = ()

    def extend(self, token_ids: list[int]) -> None:
        for token in token_ids:
            end = len(self.token_ids) - 1
            for length in _NGRAM_LENGTHS:
                if end + 1 >= length:
                    self.last_end[tuple(self.token_ids[end + 1 - length :])] = end
            self.token_ids.append(token)


class NgramProposer:
    """A :class:`~.method.DraftMethod`."""

    def __init__(self) -> None:
        self._indices: dict[str, _Index] = {}
        self._acceptance = AcceptanceTracker()

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts where one of the last n-grams occurred before."""
        drafts = {}
        for scheduled in plan:
            request = scheduled.request
            limit = room.get(request.request_id, 0)
            if limit and (draft := self._propose_one(request, limit)) is not None:
                drafts[request.request_id] = draft
        return drafts

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook | None:
        """``None``: drafts are looked up in the sequence itself."""
        return None

    def observe(self, result: VerifyResult) -> None:
        index = self._indices.get(result.sequence.request.request_id)
        if index is None:
            return
        length, num_known = index.drafted_with, min(len(index.drafts), len(result.token_ids))
        self._acceptance.record_chain(
            num_known, num_right(index.drafts, result.token_ids), lambda position: ((length, position), _PRIOR)
        )

    def release(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def _propose_one(self, request: Request, max_draft_tokens: int) -> Draft | None:
        index = self._indices.setdefault(request.request_id, _Index())
        index.extend(request.tokens_between(len(index.token_ids), request.num_tokens))
        for length in _NGRAM_LENGTHS:
            end = index.last_end.get(tuple(index.token_ids[-length:]))
            if end is None:
                continue
            drafts = continuation(index.token_ids, Match(length, end), max_draft_tokens)
            index.drafted_with, index.drafts = length, drafts
            confidences = (self._acceptance.estimate((length, position), _PRIOR) for position in range(len(drafts)))
            return Draft(drafts, confidences=tuple(confidences))
        return None
