"""What prompts and decode steps cost on many workers at once, as arrays over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from baton.core.chunk_budget import HEADROOM, MIN_PROMPT_TOKENS, SMALLEST_SHARE
from cluster.latency.estimates import PromptQueue
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


class PromptCosts(NamedTuple):
    """Of one prompt on many workers: milliseconds, ``[num_workers]``, without calibration.

    Attributes:
        ms: behind the worker's queue, beside what decodes there.
        alone_ms: with nothing else on the worker.
        work_ms: of that, what the prompt adds to steps that are made anyway.
        num_chunks: steps that it is spread over.
        ms_per_token: of prompts.
        sd: of a single step, as a share of what is predicted.
    """

    ms: Floats
    alone_ms: Floats
    work_ms: Floats
    num_chunks: Floats
    ms_per_token: Floats
    sd: Floats


class CostTable(NamedTuple):
    """What is known of some workers.

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
        """A prompt on each of the workers.

        Prompts are served in order and share steps. The step under way was put together before this prompt came, so
        that this one cannot be in it; the first step after it has room for all that fits into its budget. Beside
        sequences that decode, that is what their targets leave.

        Args:
            rates: ``[num_workers, 2]``: tokens per round of a sequence that decodes, and tokens drafted for it.
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
        """``[num_workers]``: a step that decodes."""
        c, batch = self.coefficients, np.asarray(batches, float)
        context = np.asarray(context_tokens, float)
        return np.asarray(c[0] + c[3] * batch + c[4] * context + c[5] * drafted_per_sequence * batch)
