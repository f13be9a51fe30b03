"""Learns the cost of this engine's steps while it runs. numpy only; about ten microseconds per step.

Least squares of errors relative to the measured time, so that a step that took much too long weighs little. This biases
estimates downwards; a level, the mean ratio of measured to estimated time, corrects it. Steps with and without prompts
are discounted separately, so that an hour of decoding does not erase the cost of prompts. A single step that takes many
times the expected time is left out.
"""

from __future__ import annotations

from math import exp, frexp, isfinite, log

import numpy as np

from baton.core.non_negative import Floats, solve_non_negative
from baton.core.step_costs import STEP_PRIOR, Pace, StepCosts
from baton.core.step_outliers import TRUSTED_SAMPLES, OutlierGuard
from baton.core.step_samples import StepSample
from baton.engine.contracts import StepObserver

_FIT_EVERY_STEPS = 50
_KEPT = 0.5 ** (1 / 128)
"""Factor on the weight of earlier samples for each new one of the same kind."""
_PRIOR_WEIGHT = 0.01
"""Weight of the prior, in samples."""
_SMALLEST_SHARE = 0.02
"""Lower bound of a coefficient as a share of the prior's: one that appears to be zero may still matter."""
_LEVEL_RATE = 0.02
_SMALLEST_LEVEL, _LARGEST_LEVEL = 0.5, 2.0
_RATE_PRIOR_SEQUENCES = 8.0


class _Sums:
    """Sums of the normal equations over samples of one kind."""

    def __init__(self, size: int) -> None:
        self.matrix = np.zeros((size, size))
        self.vector = np.zeros(size)

    def add(self, row: Floats) -> None:
        self.matrix *= _KEPT
        self.matrix += np.outer(row, row)
        self.vector *= _KEPT
        self.vector += row


class StepCostFit(StepObserver):
    """Fits :class:`StepCosts` to measured steps. Use only in the engine's thread."""

    def __init__(self, prior: StepCosts = STEP_PRIOR) -> None:
        self._prior = np.array(prior)
        self._with_prompts = _Sums(len(prior))
        self._without_prompts = _Sums(len(prior))
        self._log_scale = 0.0  # speed of this machine relative to the prior's
        self._num_seen = 0
        self._num_new = 0
        self._multiples = np.ones(len(prior))  # coefficients relative to the prior's
        self._level = 1.0
        self._sequences, self._emitted, self._drafted = _RATE_PRIOR_SEQUENCES, _RATE_PRIOR_SEQUENCES, 0.0
        self._pace = Pace(prior)
        self._guard: OutlierGuard[StepSample] = OutlierGuard()

    def pace(self) -> Pace:
        """The speed as of the last fit."""
        return self._pace

    def measured(self, sample: StepSample) -> None:
        """Learns from a step. Ignores an impossible one, and an outlier that the next steps do not confirm."""
        if not (isfinite(sample.ms) and sample.ms > 0 and sample.sequences > 0):
            return
        expected_ms = self._level * float(self._work_of(sample) @ self._multiples)
        kind = (sample.prompt_tokens > 0, frexp(expected_ms)[1])
        ratio = sample.ms / expected_ms if self._num_seen >= TRUSTED_SAMPLES else 1.0
        for admitted in self._guard.admit(kind, sample, ratio):
            self._learn(admitted)

    def _work_of(self, sample: StepSample) -> Floats:
        """The prior's cost of each part of a step, in milliseconds."""
        return self._prior * (
            1,
            sample.prompt_tokens,
            sample.attention_pairs,
            sample.sequences,
            sample.context_tokens,
            sample.drafted_tokens,
        )

    def _learn(self, sample: StepSample) -> None:
        work = self._work_of(sample)
        self._num_seen += 1
        self._num_new += 1
        rate = max(_LEVEL_RATE, 1 / self._num_seen)
        self._log_scale += rate * (log(sample.ms / float(work.sum())) - self._log_scale)
        ratio = sample.ms / float(work @ self._multiples)
        self._level += _LEVEL_RATE * (min(max(ratio, _SMALLEST_LEVEL), _LARGEST_LEVEL) - self._level)
        (self._with_prompts if sample.prompt_tokens else self._without_prompts).add(work / sample.ms)
        self._observe_rates(sample)
        if self._num_new >= min(_FIT_EVERY_STEPS, self._num_seen / 2):
            self._fit()

    def _observe_rates(self, sample: StepSample) -> None:
        if sample.decoding < 1:
            return
        self._sequences = _KEPT * self._sequences + sample.decoding
        self._emitted = _KEPT * self._emitted + sample.decoding + sample.accepted_tokens
        self._drafted = _KEPT * self._drafted + sample.drafted_tokens

    def _fit(self) -> None:
        self._num_new = 0
        scale = exp(self._log_scale)
        matrix = self._with_prompts.matrix + self._without_prompts.matrix + _PRIOR_WEIGHT * np.eye(len(self._prior))
        vector = self._with_prompts.vector + self._without_prompts.vector + _PRIOR_WEIGHT * scale
        self._multiples = np.maximum(solve_non_negative(matrix, vector), _SMALLEST_SHARE * scale)
        costs = StepCosts(*(self._level * self._multiples * self._prior).tolist())
        self._pace = Pace(costs, self._emitted / self._sequences, self._drafted / self._sequences)
