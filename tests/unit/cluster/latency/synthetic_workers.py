"""Workers with known costs, which learn from noisy samples of their steps as real ones do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.step_costs import StepCostReport, StepSample
from baton.engine.scheduling.step_cost_model import StepCostModel

COEFFICIENTS = (14.0, 1.1, 3e-4, 0.8, 5e-4, 1.0)


def exact_ms(sample: StepSample, scale: float = 1.0) -> float:
    fixed, prompt, pair, sequence, context, drafted = COEFFICIENTS
    return scale * (
        fixed
        + prompt * sample.prompt_tokens
        + pair * sample.attention_pairs
        + sequence * sample.sequences
        + context * sample.context_tokens
        + drafted * sample.drafted_tokens
    )


@dataclass
class SyntheticWorker:
    """A worker with known costs.

    Attributes:
        scale: factor of its durations relative to the reference worker.
        noise: standard deviation of the logarithm of durations.
        outliers: share of the samples that take 100 times as long.
    """

    scale: float = 1.0
    noise: float = 0.1
    outliers: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._now_s = 0.0
        self._costs = StepCostModel(lambda: self._now_s)

    def run(self, steps: Sequence[StepSample], now_s: float) -> StepCostReport:
        """What it reports after these steps."""
        self._now_s = now_s
        for step in steps:
            self._costs.measured(step)
        return self._costs.report()

    def prompt_step(self) -> StepSample:
        count, context = self.random.randint(2, 512), self.random.choice((0, 0, 512, 1024))
        pairs = count * context + count * (count + 1) // 2
        return self._timed(StepSample(1.0, count, pairs, self.random.randint(1, 3), 0, 0, 0, 0))

    def decode_step(self) -> StepSample:
        batch = self.random.randint(1, 16)
        context = sum(self.random.randint(10, 1500) for _ in range(batch))
        drafted = self.random.randint(0, 4) * batch
        return self._timed(StepSample(1.0, 0, 0, batch, batch, context, drafted, drafted // 2))

    def steps(self, count: int) -> list[StepSample]:
        return [self.prompt_step() if self.random.random() < 0.3 else self.decode_step() for _ in range(count)]

    def _timed(self, sample: StepSample) -> StepSample:
        ms = exact_ms(sample, self.scale) * self.random.lognormvariate(0.0, self.noise)
        return sample._replace(ms=100 * ms if self.random.random() < self.outliers else ms)
