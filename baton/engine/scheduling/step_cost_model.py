"""The engine's model of its own step cost, learned while it runs. No torch here.

One model serves the chunk budget, the length of drafts, and, in the worker's statistics, the router. A step takes about
ten microseconds to learn from, and a fit up to two milliseconds, every two seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.core.cost_fit import CostFit, is_plausible
from baton.core.speculation_rates import SpeculationRates
from baton.core.step_costs import STEP_PRIOR, Pace, StepCostReport, StepCosts, StepSample

_GUESSING_PRIOR = (0.1,)
"""Milliseconds of guessing a token, between those of a lookup and of a pass of a network."""


class StepCostModel:
    """Learns from measured steps. Use only in the engine's thread.

    The time in which drafts are guessed is measured, so that the fit covers the rest of a step: the price of verifying
    a token. Budgets and predictions add the mean time of guessing one.

    Args:
        clock: monotonic seconds, for the age of samples; a simulation passes virtual time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fit = CostFit(STEP_PRIOR)
        self._rates = SpeculationRates()
        self._guessing = CostFit(_GUESSING_PRIOR)
        self._pace = Pace()

    def measured(self, sample: StepSample) -> None:
        """Learns from a step. Ignores an impossible one, and an outlier that the next steps do not confirm."""
        self._rates.observe(sample.decoding, sample.decoding + sample.accepted_tokens, sample.drafted_tokens)
        ms, now_s = sample.ms, self._clock()
        if not is_plausible(ms) or not 0.0 <= sample.draft_ms <= ms:
            return
        if sample.drafted_tokens:
            ms -= sample.draft_ms
            self._guessing.observe((sample.drafted_tokens,), sample.draft_ms, now_s)
        if self._fit.observe(_features(sample), ms, now_s):
            self._update()

    def pace(self) -> Pace:
        """The speed as of the last fit."""
        return self._pace

    def ms(self, num_sequences: float, num_tokens: float, context_tokens: float = 0.0) -> float:
        """The expected time of a decode step without that of guessing, in milliseconds.

        Args:
            num_tokens: rows of the forward; those beyond ``num_sequences`` verify drafts.
            context_tokens: tokens that the sequences attend to, over all of them.
        """
        fixed, _, _, sequence, context, drafted = self._fit.coefficients
        extra = max(0.0, num_tokens - num_sequences)
        return fixed + sequence * num_sequences + context * context_tokens + drafted * extra

    def report(self) -> StepCostReport:
        """What was learned of all steps so far."""
        self._fit.refit(self._clock())
        self._update()
        return StepCostReport(self._pace.costs, self._fit.sd, self._fit.num_samples, self._rates.copy())

    def _update(self) -> None:
        costs = StepCosts(*self._fit.coefficients)
        if self._guessing.num_samples:
            costs = costs._replace(per_drafted_token=costs.per_drafted_token + self._guessing.coefficients[0])
        self._pace = Pace(costs, *self._rates.rates(0))


def _features(sample: StepSample) -> tuple[float, ...]:
    return (
        1.0,
        sample.prompt_tokens,
        sample.attention_pairs,
        sample.sequences,
        sample.context_tokens,
        sample.drafted_tokens,
    )
