"""A request on a simulated engine, and what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.errors import BatonError
from baton.core.request import FinishReason, Request

UNIT = 1000
"""Progress is counted in thousandths of a token: speculation gives fractions, and sums of floats would drift."""


class StepsTaken(NamedTuple):
    """The steps that made an output.

    Attributes:
        last_index: number of the last one.
        sequences, prompt_tokens: of the last one.
    """

    last_index: int
    started_s: float
    ended_s: float
    num_steps: int
    sequences: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SimulatedOutput:
    """
    Attributes:
        at_s: when the step that made the last token ended.
    """

    token_ids: list[int]
    finish_reason: FinishReason | None
    at_s: float
    num_drafted: int
    num_accepted: int
    steps: StepsTaken


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """
    Attributes:
        outputs: an error is the last thing that comes.
        on_computed: called after every step that computed some of the prompt, with how much of it has its KV, and when.
        stop: number of tokens after which the answer ends by itself.
        base_tokens: known when it began to decode; the engine's progress was ``base_progress`` then.
        message_tokens: of the next message.
        due_tokens: output tokens at which the next message is due.
        last_step: before the first one of its next message; it ended at ``last_s``.
    """

    request: Request
    on_computed: Callable[[int, float], None] | None = None
    stop: int | None = None
    outputs: asyncio.Queue[SimulatedOutput | BatonError] = field(default_factory=asyncio.Queue)
    is_decoding: bool = False
    base_output: int = 0
    base_progress: int = 0
    message_tokens: int = 1
    due_tokens: int = 0
    last_step: int = 0
    last_s: float = 0.0

    @property
    def length(self) -> int:
        """Output tokens at which it ends at the latest."""
        return self.request.params.max_tokens if self.stop is None else self.stop

    @property
    def remaining(self) -> int:
        """Known tokens without KV."""
        return self.request.num_tokens - self.request.num_computed_tokens

    def output_at(self, progress: int) -> int:
        """How many output tokens it has when the engine is so far."""
        return min(self.length, self.base_output + (progress - self.base_progress) // UNIT)

    def progress_at(self, output_tokens: int) -> int:
        """How far the engine is when it has so many output tokens."""
        return self.base_progress + (output_tokens - self.base_output) * UNIT
