"""What engine steps cost, as numbers that a latency model is fitted to. No torch here.

Samples are kept in a ring and numbered, and whoever asks says which one it has seen last. So any number of readers can
ask, none of them takes a sample from another, and one that comes too late only misses the oldest.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MAX_SAMPLES = 1024


class StepSample(NamedTuple):
    """One step.

    Attributes:
        ms: from the end of the step before, or from this one's start when the engine slept in between.
        prompt_tokens: of prompts, and of what is computed again.
        attention_pairs: how many (token, token before it) pairs these tokens attended to.
        sequences: in the step, of both kinds.
        decoding: of these, the ones whose last known token alone was computed.
        context_tokens: that decoding sequences attended to, over all of them.
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
    """The newest samples of an engine. Belongs to the engine's thread."""

    def __init__(self, capacity: int = MAX_SAMPLES) -> None:
        self._ring: deque[StepSample] = deque(maxlen=capacity)
        self.last_index = 0
        """Number of the newest sample; they count from 1."""

    def add(self, sample: StepSample) -> None:
        self._ring.append(sample)
        self.last_index += 1

    def after(self, index: int) -> list[StepSample]:
        """Those behind number ``index`` that are still here, oldest first."""
        count = min(len(self._ring), max(0, self.last_index - index))
        return list(self._ring)[len(self._ring) - count :]
