"""Durations of steps. Many steps of a decode-only batch form one leap, whose duration has a closed form."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, sqrt
from random import Random

from baton.core.step_costs import StepCosts, StepSample


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step, with the names of :class:`baton.core.step_costs.StepSample`."""

    prompt_tokens: int = 0
    attention_pairs: int = 0
    sequences: int = 0
    context_tokens: float = 0.0
    drafted_tokens: float = 0.0

    def ms(self, costs: StepCosts) -> float:
        return costs.step_ms(
            self.prompt_tokens, self.attention_pairs, self.sequences, self.context_tokens, self.drafted_tokens
        )


def sample_leap(leap: Leap, work: StepWork, batch: int, tokens_per_round: float) -> StepSample:
    """One sample for all steps of a leap, which describes its middle step.

    Args:
        work: work of its first step.
        batch: number of decoding sequences.
    """
    context = work.context_tokens + (leap.num_steps - 1) / 2 * batch * tokens_per_round
    drafted = round(work.drafted_tokens)
    return StepSample(
        (leap.end_s() - leap.started_s) * 1e3 / leap.num_steps,
        work.prompt_tokens,
        work.attention_pairs,
        work.sequences,
        batch,
        round(context),
        drafted,
        min(drafted, round(batch * (tokens_per_round - 1))),
    )


@dataclass(slots=True)
class Leap:
    """``num_steps`` steps of one batch, whose durations grow linearly with the contexts.

        duration of the first k steps = k·first + growth·k·(k - 1)/2

    Attributes:
        first_ms, growth_ms: duration of the first step, and growth per step; both include noise.
    """

    started_s: float
    num_steps: int
    first_ms: float
    growth_ms: float

    def end_s(self, num_steps: int | None = None) -> float:
        """End of the first ``num_steps`` steps; ``None`` means all steps."""
        k = self.num_steps if num_steps is None else num_steps
        return self.started_s + (k * self.first_ms + self.growth_ms * k * (k - 1) / 2) / 1e3

    def steps_begun(self, now_s: float) -> int:
        """Number of steps begun by ``now_s``, from 1 to ``num_steps``."""
        elapsed_ms = max(0.0, (now_s - self.started_s) * 1e3)
        half = self.growth_ms / 2
        if half > 0:
            linear = self.first_ms - half
            k = (-linear + sqrt(linear * linear + 4 * half * elapsed_ms)) / (2 * half)
        else:
            k = elapsed_ms / self.first_ms
        return min(self.num_steps, max(1, ceil(k - 1e-9)))


class Noise:
    """Log-normal factors with a mean of 1.

    Args:
        sd: standard deviation for a single step.
    """

    def __init__(self, sd: float, seed: str) -> None:
        self._sd = sd
        self._random = Random(seed)

    def factor(self, num_steps: int) -> float:
        """A factor for the mean of ``num_steps`` steps."""
        if not self._sd:
            return 1.0
        sd = self._sd / sqrt(num_steps)
        return exp(self._random.gauss(-sd * sd / 2, sd))
