"""What a step will compute without drafts, and which of its sequences may get some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.drafts import ScheduledSequence


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A step for which drafts are wanted.

    Attributes:
        wanting: sequences that have room for a draft.
        room: maximum number of tokens to draft, by request id.
        num_sequences: number of sequences that yield a token anyway.
        num_tokens: without any draft.
        context_tokens: in the contexts of all its sequences together.
    """

    wanting: Sequence[ScheduledSequence]
    room: Mapping[str, int]
    num_sequences: int
    num_tokens: int
    context_tokens: int

    @classmethod
    def of(cls, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> DraftStep:
        return cls(
            [sequence for sequence in plan if sequence.request.request_id in room],
            room,
            sum(sequence.samples for sequence in plan),
            sum(sequence.num_tokens for sequence in plan),
            sum(sequence.request.num_computed_tokens for sequence in plan),
        )
