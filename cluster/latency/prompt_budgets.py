""":func:`baton.core.chunk_budget.prompt_budget` for many workers at once; a test keeps the two equal."""

from __future__ import annotations

import numpy as np

from baton.core.chunk_budget import HEADROOM, MIN_PROMPT_TOKENS, SMALLEST_SHARE
from cluster.latency.robust_fit import Floats


def prompt_budgets(
    coefficients: Floats,
    chunk_tokens: Floats,
    decoding: Floats,
    context_tokens: Floats,
    tpot_targets_s: Floats,
    rates: Floats,
    starts: Floats,
) -> Floats:
    """Prompt tokens that share a step with what decodes, ``[num_workers]``, as are all arguments but two.

    Args:
        coefficients: ``[num_features, num_workers]``, in the order of :class:`baton.core.step_costs.StepCosts`.
        tpot_targets_s: the strictest of the sequences that decode; 0: none.
        rates: ``[num_workers, 2]``: tokens per round and drafted tokens of each of them.
        starts: prompt tokens that are computed already.
    """
    most = np.maximum(1.0, chunk_tokens - decoding)
    fixed, per_token, per_pair, per_sequence, per_context, per_drafted = coefficients
    drafted = rates[:, 1]
    without = fixed + per_sequence * decoding + per_context * context_tokens + per_drafted * drafted * decoding
    allowed = HEADROOM * tpot_targets_s * 1e3
    ms = np.maximum(0.0, np.maximum(allowed - without, SMALLEST_SHARE * without) - per_sequence)
    half = per_pair / 2
    linear = per_token + half * (2 * starts + 1)
    divisor = linear + np.sqrt(linear * linear + 4 * half * ms)
    in_time = np.divide(2 * ms, divisor, out=np.where(ms > 0, most, 0.0), where=divisor > 0)
    within = np.minimum(most, np.maximum(MIN_PROMPT_TOKENS, np.floor(np.minimum(most, in_time))))
    return np.where((decoding < 1) | (tpot_targets_s <= 0), most, within)
