"""Drafts and grammars.

Tokens that a grammar forces, such as the keys of a JSON object, are drafted without a prediction. Drafts of other
methods end where a grammar refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.contracts import VerifyResult
from decode_worker.speculation.acceptance import AcceptanceTracker, num_right
from decode_worker.speculation.method import Outlook

_PRIOR = 0.9
"""The text is certain, but the model may divide it into other tokens."""


class ForcedTokens:
    """A :class:`~.method.DraftMethod` for requests with a grammar."""

    def __init__(self) -> None:
        self._drafted: dict[str, tuple[int, ...]] = {}
        self._acceptance = AcceptanceTracker()

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts where the grammar allows only one text."""
        drafts = {}
        for request in (sequence.request for sequence in plan):
            limit = room.get(request.request_id, 0)
            if request.grammar is not None and limit:
                tokens = tuple(request.grammar.forced(request.output_token_ids)[:limit])
                self._drafted[request.request_id] = tokens
                if tokens:
                    confidences = (self._acceptance.estimate(position, _PRIOR) for position in range(len(tokens)))
                    drafts[request.request_id] = Draft(tokens, confidences=tuple(confidences))
        return drafts

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook | None:
        """``None``: the grammar knows the tokens."""
        return None

    def observe(self, result: VerifyResult) -> None:
        drafted = self._drafted.pop(result.sequence.request.request_id, ())
        num_known = min(len(drafted), len(result.token_ids))
        num_accepted = num_right(drafted, result.token_ids)
        self._acceptance.record_chain(num_known, num_accepted, lambda position: (position, _PRIOR))

    def release(self, request_id: str) -> None:
        self._drafted.pop(request_id, None)


def within_grammars(plan: Sequence[ScheduledSequence], drafts: Mapping[str, Draft]) -> dict[str, Draft]:
    """The drafts without what grammars refuse; trees, and drafts that were drawn, stay as they are."""
    kept = dict(drafts)
    for request in (sequence.request for sequence in plan):
        draft = drafts.get(request.request_id)
        if draft is not None and request.grammar is not None and draft.is_chain and draft.probs is None:
            kept[request.request_id] = draft.first(
                request.grammar.num_allowed(request.output_token_ids, draft.token_ids)
            )
    return {request_id: draft for request_id, draft in kept.items() if len(draft)}
