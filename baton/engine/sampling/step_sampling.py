"""Reads from a step's plan what the step had to do."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.drafts import ScheduledSequence
from baton.core.step_samples import StepSample


def sample_step(plan: Sequence[ScheduledSequence]) -> StepSample:
    """Of a step that is not booked yet, so that its requests still stand where it found them; what it took and what it
    accepted is left at 0."""
    prompt_tokens = pairs = decoding = context = drafted = 0
    for sequence in plan:
        start, count = sequence.request.num_computed_tokens, sequence.num_tokens
        if count == 1:
            decoding += 1
            context += start + 1
            drafted += len(sequence.draft)
        else:
            prompt_tokens += count
            pairs += count * start + count * (count + 1) // 2
    return StepSample(0.0, prompt_tokens, pairs, len(plan), decoding, context, drafted, 0)
