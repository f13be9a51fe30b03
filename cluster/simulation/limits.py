"""Limits of an engine's steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Like ``baton.engine.scheduling.scheduler.SchedulerLimits``, without torch.

    Attributes:
        chunk_tokens: token budget of one step, shared by all its sequences.
        max_num_seqs: largest number of running sequences.
        max_model_len: largest number of prompt and output tokens of one request.
    """

    chunk_tokens: int
    max_num_seqs: int
    max_model_len: int
