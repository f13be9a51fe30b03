"""How many prompt tokens may share a step with decoding sequences, given their TPOT targets.

    allowed = max(60 % of target - step without prompts, 10 % of that step)

A pure function of counts and costs, shared by engines, predictions and simulated workers. Chunked prefill next to
decoding: Agrawal et al., Sarathi-Serve (OSDI 2024), whose budget is a constant found by profiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from baton.core.step_costs import STEP_PRIOR, Pace, StepCosts

MIN_PROMPT_TOKENS = 16
"""Minimum for all prompts of a step together, whatever the targets, so that prompts always make progress."""
HEADROOM = 0.6
"""Share of the TPOT target that a step may take. Costs are estimates, and a joining sequence first waits for the end of
the running step. Speculation does not relax it: accepted tokens arrive together, after a longer wait."""
SMALLEST_SHARE = 0.1
"""Prompts may lengthen any step by this share of it. Prompts do not cause a target that is missed without them, and on
a fast machine this is many more tokens than :data:`MIN_PROMPT_TOKENS`."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a scheduler's steps and requests.

    Attributes:
        chunk_tokens: token budget of one step, shared by all its sequences.
        max_num_seqs: sequences that may run at once; never more than ``chunk_tokens``.
        max_model_len: prompt and output tokens of one request.
    """

    chunk_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(slots=True)
class PromptAllowance:
    """What prompts may still take of one step.

    Attributes:
        tokens: rest of the step's token budget.
        ms: rest of the step's time.
        sure_tokens: tokens that may be taken whatever time they cost.
        costs: cost coefficients of the step.
    """

    tokens: int
    ms: float = inf
    sure_tokens: int = MIN_PROMPT_TOKENS
    costs: StepCosts = STEP_PRIOR

    def tokens_at(self, start: int) -> int:
        """Number of tokens of a prompt that may be computed, beginning at position ``start``."""
        return min(self.tokens, max(self.sure_tokens, self._tokens_in_time(start)))

    def take(self, num_tokens: int, start: int) -> None:
        """Deducts a scheduled chunk from the step's budget."""
        self.tokens -= num_tokens
        self.sure_tokens = max(0, self.sure_tokens - num_tokens)
        self.ms -= self.costs.chunk_ms(num_tokens, start)

    def _tokens_in_time(self, start: int) -> int:
        if self.ms == inf:
            return self.tokens
        ms = self.ms - self.costs.per_sequence
        if ms <= 0:
            return 0
        # The root of chunk_ms(n, start) = ms, in the form that works without a quadratic term.
        half = self.costs.per_attention_pair / 2
        linear = self.costs.per_prompt_token + half * (2 * start + 1)
        divisor = linear + sqrt(linear * linear + 4 * half * ms)
        return self.tokens if divisor <= 0 else int(min(self.tokens, 2 * ms / divisor))


def prompt_allowance(
    tokens: int, decoding: int, context_tokens: float, tpot_target_s: float, pace: Pace
) -> PromptAllowance:
    """Returns what prompts may take of a step that also decodes.

    Args:
        tokens: rest of the step's token budget.
        decoding: number of decoding sequences in the step.
        context_tokens: their total context length.
        tpot_target_s: their strictest TPOT target; 0 means none.
    """
    if decoding < 1 or tpot_target_s <= 0:
        return PromptAllowance(tokens)
    without_ms = pace.costs.decode_ms(decoding, context_tokens, pace.drafted_tokens * decoding)
    allowed_ms = HEADROOM * tpot_target_s * 1e3
    return PromptAllowance(
        tokens, max(allowed_ms - without_ms, SMALLEST_SHARE * without_ms), MIN_PROMPT_TOKENS, pace.costs
    )
