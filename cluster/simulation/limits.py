"""What an engine may do in a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """As ``baton.engine.scheduling.scheduler.SchedulerLimits``, without torch.

    Attributes:
        chunk_tokens: token budget of one step, shared by all its sequences.
        max_num_seqs: sequences that may run at once.
        max_model_len: prompt and output tokens of one request.
    """

    chunk_tokens: int
    max_num_seqs: int
    max_model_len: int
