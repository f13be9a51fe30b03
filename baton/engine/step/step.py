"""One step of the engine, from its plan to its logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.engine.batch.batch import ForwardBatch
from baton.engine.sampling.prompt_scores import QueuedScores


@dataclass(frozen=True, slots=True)
class Launched:
    """A forward that is queued on the device.

    Attributes:
        logits: float32 ``[num_rows, vocab_size]`` of ``batch.logit_rows``, without the prompt rows.
        scores: log probabilities from the prompt rows.
    """

    batch: ForwardBatch
    logits: torch.Tensor
    scores: QueuedScores


@dataclass(slots=True)
class Step:
    """The state of one step.

    Attributes:
        plan: sequences of the step, with their drafts once these are proposed.
        started_s, scheduled_s, proposed_s: monotonic seconds at which scheduling began, the plan was complete, and the
            drafts were.
        launched: ``None`` until the forward is queued.
        is_booked: the scheduler counts the plan's tokens as computed, so the step cannot be retried.
    """

    plan: list[ScheduledSequence]
    started_s: float
    scheduled_s: float = 0.0
    proposed_s: float = 0.0
    launched: Launched | None = None
    is_booked: bool = False

    def live_sequences(self) -> list[ScheduledSequence]:
        """The sequences whose requests have not ended since the step was planned."""
        return [sequence for sequence in self.plan if not sequence.request.is_finished]

    def add_drafts(self, drafts: Mapping[str, Draft], room: Mapping[str, int]) -> None:
        """Attaches drafts, cut to the number of tokens in ``room``; both are by request id."""
        for index, sequence in enumerate(self.plan):
            request_id = sequence.request.request_id
            if request_id in drafts and (limit := room.get(request_id, 0)):
                draft = drafts[request_id].first(limit)
                self.plan[index] = ScheduledSequence(sequence.request, sequence.num_tokens, draft)

    def restart(self) -> None:
        """Resets the step to before its forward, without drafts and without ended requests."""
        self.plan = [ScheduledSequence(sequence.request, sequence.num_tokens) for sequence in self.live_sequences()]
        self.launched = None
