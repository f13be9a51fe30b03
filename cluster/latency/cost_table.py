"""Costs of prompts and decode steps on many workers at once, as arrays over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from baton.core.chunk_budget import HEADROOM, MIN_PROMPT_TOKENS, SMALLEST_SHARE
from baton.core.robust_fit import Floats
from cluster.latency.estimates import PromptQueue


def attention_pairs(uncached_tokens: int, context_tokens: int) -> int:
    """Number of (token, earlier token) pairs of a prompt after ``context_tokens`` cached ones, for any chunking."""
    return uncached_tokens * context_tokens + uncached_tokens * (uncached_tokens + 1) // 2


def prompt_budgets(
    coefficients: Floats,
    chunk_tokens: Floats,
    decoding: Floats,
    context_tokens: Floats,
    tpot_targets_s: Floats,
    rates: Floats,
    starts: Floats,
) -> Floats:
    """Prompt tokens per step beside the sequences that decode, ``[num_workers]``.

    All arguments are ``[num_workers]``, except ``coefficients`` and ``rates``.

    Args:
        coefficients: ``[num_features, num_workers]``, in the order of :class:`baton.core.step_costs.StepCosts`.
        tpot_targets_s: the strictest TPOT target of the sequences that decode; 0 means none.
        rates: ``[num_workers, 2]``: tokens per round of a decoding sequence, and tokens drafted for it.
        starts: prompt tokens that were computed before.
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


class PromptCosts(NamedTuple):
    """Costs of one prompt on many workers: milliseconds, ``[num_workers]``, without calibration.

    Attributes:
        ms: cost after the worker's queue and beside the sequences that decode there.
        alone_ms: cost on an idle worker.
        work_ms: the part of ``alone_ms`` without the fixed cost of steps.
        num_chunks: number of steps for the prompt.
        ms_per_token: cost of a prompt token.
        sd: standard deviation of a single step, relative to the prediction.
    """

    ms: Floats
    alone_ms: Floats
    work_ms: Floats
    num_chunks: Floats
    ms_per_token: Floats
    sd: Floats


class CostTable(NamedTuple):
    """The fitted costs of some workers.

    Attributes:
        coefficients: ``[num_features, num_workers]``.
        chunk_tokens: ``[num_workers]``, token budget of a step.
        sd: ``[num_workers]``, as in :class:`PromptCosts`.
    """

    coefficients: Floats
    chunk_tokens: Floats
    sd: Floats

    def prompt_costs(
        self,
        uncached_tokens: Sequence[int] | Floats,
        context_tokens: Sequence[int] | Floats,
        queues: Sequence[PromptQueue],
        rates: Floats,
    ) -> PromptCosts:
        """Costs of a prompt on each of the workers.

        Prompts are served in order and share steps. The step in progress was composed before this prompt came, so the
        prompt can join the next step at the earliest. The TPOT targets of the sequences that decode limit the budget of
        a step.

        Args:
            rates: ``[num_workers, 2]``: tokens per round of a decoding sequence, and drafted tokens per round.
        """
        c, uncached, cached = self.coefficients, np.asarray(uncached_tokens, float), np.asarray(context_tokens, float)
        ahead, pairs, prompts, elapsed, decoding, context, targets = np.array(
            [
                (q.tokens, q.attention_pairs, q.prompts, q.elapsed_ms, q.decoding, q.context_tokens, q.tpot_target_s)
                for q in queues
            ],
            dtype=float,
        ).T
        starts = cached + uncached // 2
        budget = prompt_budgets(c, self.chunk_tokens, decoding, context, targets, rates, starts)
        own_pairs = uncached * cached + uncached * (uncached + 1) / 2
        step = c[0] + c[3] * decoding + c[4] * context + c[5] * rates[:, 1] * decoding
        own_steps = np.ceil(uncached / budget)
        work = c[1] * uncached + c[2] * own_pairs
        own = own_steps * (step + c[3]) + work
        steps = (ahead > 0) + np.ceil((np.maximum(0.0, ahead - budget) + uncached) / budget)
        total = steps * step + c[1] * ahead + c[2] * pairs + work + c[3] * (prompts + own_steps)
        num_chunks = np.ceil(uncached / self.chunk_tokens)
        alone = num_chunks * (c[0] + c[3]) + work
        return PromptCosts(np.maximum(own, total - elapsed), alone, work, num_chunks, c[1], self.sd)

    def step_ms(
        self, batches: Sequence[int] | Floats, context_tokens: Sequence[int] | Floats, drafted_per_sequence: Floats
    ) -> Floats:
        """``[num_workers]``: milliseconds of a decode step."""
        c, batch = self.coefficients, np.asarray(batches, float)
        context = np.asarray(context_tokens, float)
        return np.asarray(c[0] + c[3] * batch + c[4] * context + c[5] * drafted_per_sequence * batch)
