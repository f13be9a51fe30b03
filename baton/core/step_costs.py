"""The cost of a step as a linear function of its contents: samples, coefficients, and what a worker reports.

    step_ms = c0 + c1·prompt tokens + c2·attention pairs + c3·sequences + c4·context tokens + c5·drafted tokens

No torch here.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from baton.core.speculation_rates import SpeculationRates


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
        draft_ms: part of ``ms`` in which these tokens were guessed.
    """

    ms: float
    prompt_tokens: int
    attention_pairs: int
    sequences: int
    decoding: int
    context_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    draft_ms: float = 0.0


class StepCosts(NamedTuple):
    """Coefficients in milliseconds, each multiplied by a count of :class:`StepSample`."""

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

    def step_ms(
        self,
        prompt_tokens: float,
        attention_pairs: float,
        sequences: float,
        context_tokens: float,
        drafted_tokens: float,
    ) -> float:
        """Cost of a step with the given counts of :class:`StepSample`."""
        return (
            self.fixed
            + self.per_prompt_token * prompt_tokens
            + self.per_attention_pair * attention_pairs
            + self.per_sequence * sequences
            + self.per_context_token * context_tokens
            + self.per_drafted_token * drafted_tokens
        )

    def chunk_ms(self, num_tokens: int, start: int) -> float:
        """Cost that a prompt chunk of positions ``[start, start + num_tokens)`` adds to a step."""
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
        return self.per_sequence + self.per_prompt_token * num_tokens + self.per_attention_pair * pairs


STEP_PRIOR = StepCosts(10.0, 0.5, 1e-4, 0.3, 5e-4, 0.25)
"""Costs of a small model on a CPU, used before anything is measured; afterwards its shape covers what the samples leave
open. A drafted token takes 2.5 % of a step of one sequence, as in memory-bound decoding on CPUs and GPUs alike."""


class Pace(NamedTuple):
    """An engine's speed.

    Attributes:
        tokens_per_round: tokens that a step yields per sequence; 1 without speculation.
        drafted_tokens: tokens that a step verifies per sequence.
    """

    costs: StepCosts = STEP_PRIOR
    tokens_per_round: float = 1.0
    drafted_tokens: float = 0.0


class StepCostReport(NamedTuple):
    """What a worker has learned of its steps.

    Attributes:
        costs: coefficients; those of drafted tokens include the time in which they are guessed.
        sd: standard deviation of a single step, relative to the prediction.
        num_samples: number of steps that were learned from.
    """

    costs: StepCosts
    sd: float
    num_samples: int
    rates: SpeculationRates

    def is_plausible(self) -> bool:
        """Whether all figures are finite and none is below zero, and the costs are above it."""
        figures = (*self.costs, self.sd)
        return (
            all(isfinite(value) and value >= 0 for value in figures)
            and any(self.costs)
            and all(sums.is_plausible() for sums in self.rates.sums.values())
        )
