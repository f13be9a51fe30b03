"""Measured costs of engine steps, to which a latency model is fitted. No torch here.

Samples are numbered and kept in a ring; a reader passes the number of the last one it has read. Any number of readers
can read independently, and a slow one only misses the oldest samples.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MAX_SAMPLES = 1024


class StepSample(NamedTuple):
    """One step.

    Attributes:
        ms: time from the end of the step before, or from this one's start when the engine slept in between.
        prompt_tokens: tokens of prompts and of recomputation.
        attention_pairs: number of (token, token before it) pairs that these tokens attended to.
        sequences: sequences in the step, of both kinds.
        decoding: sequences of which only the last known token was computed.
        context_tokens: tokens that decoding sequences attended to, over all of them.
        drafted_tokens, accepted_tokens: guessed tokens that the step verified, and those that were right.
    """

    ms: float
    prompt_tokens: int
    attention_pairs: int
    sequences: int
    decoding: int
    context_tokens: int
    drafted_tokens: int
    accepted_tokens: int


class StepSamples:
    """The newest samples of an engine. Use only in the engine's thread."""

    def __init__(self, capacity: int = MAX_SAMPLES) -> None:
        self._ring: deque[StepSample] = deque(maxlen=capacity)
        self.last_index = 0
        """Number of the newest sample, from 1."""

    def add(self, sample: StepSample) -> None:
        self._ring.append(sample)
        self.last_index += 1

    def after(self, index: int) -> list[StepSample]:
        """Samples with a number above ``index`` that are still in the ring, oldest first."""
        count = min(len(self._ring), max(0, self.last_index - index))
        return list(self._ring)[len(self._ring) - count :]
