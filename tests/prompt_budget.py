"""The prompt tokens of one step, for tests of what engines and predictions make of them."""

from __future__ import annotations

from baton.core.chunk_budget import prompt_allowance
from baton.core.step_costs import Pace, StepCosts


def prompt_budget(
    chunk_tokens: int,
    decoding: int,
    context_tokens: float,
    tpot_target_s: float,
    costs: StepCosts,
    *,
    drafted_tokens: float = 0.0,
    start: int = 0,
) -> int:
    """Prompt tokens that may share a step with decoding sequences, at least one.

    Args:
        chunk_tokens: token budget of the step; each decoding sequence takes one of them.
        context_tokens: total context length of the decoding sequences.
        tpot_target_s: their strictest TPOT target; 0 means none.
        drafted_tokens: tokens that a step verifies for each of them.
        start: prompt tokens that are computed already.
    """
    tokens = max(1, chunk_tokens - decoding)
    pace = Pace(costs, drafted_tokens=drafted_tokens)
    return prompt_allowance(tokens, decoding, context_tokens, tpot_target_s, pace).tokens_at(start)
