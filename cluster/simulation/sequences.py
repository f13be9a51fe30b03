"""Sequences of a simulated engine, and their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.errors import BatonError
from baton.core.request import FinishReason, Request

UNIT = 1000
"""Progress is counted in thousandths of a token, since speculation yields fractions and floats would drift."""


class StepsTaken(NamedTuple):
    """The steps of an output.

    Attributes:
        last_index: number of the last step.
        sequences, prompt_tokens: sequences and prompt tokens in the last step.
    """

    last_index: int
    started_s: float
    ended_s: float
    num_steps: int
    sequences: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SimulatedOutput:
    """New tokens of a sequence.

    Attributes:
        at_s: end of the step that produced the last token.
    """

    token_ids: list[int]
    finish_reason: FinishReason | None
    at_s: float
    num_drafted: int
    num_accepted: int
    steps: StepsTaken


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A request on a simulated engine.

    Attributes:
        outputs: its outputs; an error is always the last item.
        on_computed: called after every step that computed a part of the prompt, with the number of tokens that have KV
            and the time.
        stop: number of tokens after which the answer ends by itself; ``None`` if it ends by length.
        base_output, base_progress: output tokens and the engine's progress when it began to decode.
        message_tokens: tokens of the next message.
        due_tokens: output tokens at which the next message is due.
        last_step, last_s: the last step before its next message, and the end of that step.
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
        """Output tokens at which it ends."""
        return self.request.params.max_tokens if self.stop is None else self.stop

    @property
    def remaining(self) -> int:
        """Number of known tokens without KV."""
        return self.request.num_tokens - self.request.num_computed_tokens

    def output_at(self, progress: int) -> int:
        """Output tokens of the sequence at a progress of the engine."""
        return min(self.length, self.base_output + (progress - self.base_progress) // UNIT)

    def progress_at(self, output_tokens: int) -> int:
        """Progress of the engine at which the sequence has ``output_tokens``."""
        return self.base_progress + (output_tokens - self.base_output) * UNIT
