"""The cost of a step as a linear function of its contents. No torch here."""

from __future__ import annotations

from typing import NamedTuple


class StepCosts(NamedTuple):
    """Coefficients in milliseconds, each multiplied by a count of :class:`baton.core.step_samples.StepSample`."""

    fixed: float
    per_prompt_token: float
    per_attention_pair: float
    per_sequence: float
    per_context_token: float
    per_drafted_token: float = 0.0

    def decode_ms(self, decoding: float, context_tokens: float, drafted_tokens: float = 0.0) -> float:
        """Cost of a step without prompts.

        Args:
            decoding: number of sequences in the step.
            context_tokens, drafted_tokens: totals over these sequences.
        """
        return (
            self.fixed
            + self.per_sequence * decoding
            + self.per_context_token * context_tokens
            + self.per_drafted_token * drafted_tokens
        )

    def chunk_ms(self, num_tokens: int, start: int) -> float:
        """Cost that a prompt chunk of positions ``[start, start + num_tokens)`` adds to a step."""
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
        return self.per_sequence + self.per_prompt_token * num_tokens + self.per_attention_pair * pairs


STEP_PRIOR = StepCosts(10.0, 0.5, 1e-4, 0.3, 5e-4, 0.5)
"""Costs of a small model on a CPU, used before anything is measured."""


class Pace(NamedTuple):
    """An engine's speed.

    Attributes:
        tokens_per_round: tokens that a step yields per sequence; 1 without speculation.
        drafted_tokens: tokens that a step verifies per sequence.
    """

    costs: StepCosts = STEP_PRIOR
    tokens_per_round: float = 1.0
    drafted_tokens: float = 0.0
