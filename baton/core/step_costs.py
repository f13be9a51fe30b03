"""What a step costs, as a linear function of what is in it. No torch here."""

from __future__ import annotations

from typing import NamedTuple


class StepCosts(NamedTuple):
    """Milliseconds of a step: each of these times what :class:`baton.core.step_samples.StepSample` counts."""

    fixed: float
    per_prompt_token: float
    per_attention_pair: float
    per_sequence: float
    per_context_token: float
    per_drafted_token: float = 0.0

    def decode_ms(self, decoding: float, context_tokens: float, drafted_tokens: float = 0.0) -> float:
        """A step without prompts.

        Args:
            decoding: sequences in it.
            context_tokens, drafted_tokens: of all of them together.
        """
        return (
            self.fixed
            + self.per_sequence * decoding
            + self.per_context_token * context_tokens
            + self.per_drafted_token * drafted_tokens
        )

    def chunk_ms(self, num_tokens: int, start: int) -> float:
        """What a prompt's chunk of positions ``[start, start + num_tokens)`` adds to a step."""
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
        return self.per_sequence + self.per_prompt_token * num_tokens + self.per_attention_pair * pairs


STEP_PRIOR = StepCosts(10.0, 0.5, 1e-4, 0.3, 5e-4, 0.5)
"""Of a small model on a CPU, where nothing was measured yet."""


class Pace(NamedTuple):
    """How fast an engine goes.

    Attributes:
        tokens_per_round: that a sequence gets from a step; 1 without speculation.
        drafted_tokens: that a step verifies for each sequence.
    """

    costs: StepCosts = STEP_PRIOR
    tokens_per_round: float = 1.0
    drafted_tokens: float = 0.0
