"""What an engine learns of its own steps: close to the truth in spite of noise, and not forgetting what is rare."""

from __future__ import annotations

import math
import random

import pytest

from baton.core.step_costs import STEP_PRIOR, StepCosts, StepSample
from baton.engine.scheduling.step_cost_model import StepCostModel

CPU = StepCosts(18.0, 0.35, 2e-4, 0.5, 8e-4, 0.4)
GPU = StepCosts(8.0, 0.02, 2e-6, 0.02, 1e-5, 0.01)


class Steps:
    """Samples of a machine with known costs.

    Args:
        noise: standard deviation of a step, relative to it.
        outliers: share of steps that something else held up sixfold.
    """

    def __init__(self, costs: StepCosts, noise: float = 0.0, outliers: float = 0.0) -> None:
        self.random = random.Random(3)
        self.costs, self.noise, self.outliers = costs, noise, outliers

    def sample(self, *, prompts: bool = True) -> StepSample:
        decoding = self.random.randint(1, 32)
        context = decoding * self.random.randint(50, 3000)
        drafted = decoding * 3 if self.random.random() < 0.5 else 0
        ms = self.costs.decode_ms(decoding, context, drafted)
        num_tokens, start, sequences = 0, self.random.randint(0, 3000), decoding
        if prompts and self.random.random() < 0.3:
            num_tokens, sequences = self.random.choice([16, 64, 130, 400]), decoding + 1
            ms += self.costs.chunk_ms(num_tokens, start)
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        ms *= math.exp(self.random.gauss(-self.noise * self.noise / 2, self.noise))
        if self.random.random() < self.outliers:
            ms *= 6
        return StepSample(ms, num_tokens, pairs, sequences, decoding, context, drafted, drafted // 3)


def error(costs: StepCosts, true: StepCosts) -> float:
    """The largest of a few kinds of steps, relative."""
    steps = [(4, 2000, 0, 0, 0), (24, 40_000, 0, 0, 0), (8, 8000, 128, 500, 0), (8, 8000, 400, 2000, 16)]

    def ms(of: StepCosts, decoding: int, context: int, prompt: int, start: int, drafted: int) -> float:
        return of.decode_ms(decoding, context, drafted) + (of.chunk_ms(prompt, start) if prompt else 0.0)

    return max(abs(ms(costs, *step) / ms(true, *step) - 1) for step in steps)


@pytest.mark.parametrize("true", [CPU, GPU])
@pytest.mark.parametrize(
    ("noise", "outliers", "num_samples", "largest"),
    [(0.0, 0.0, 300, 0.02), (0.05, 0.0, 60, 0.2), (0.3, 0.03, 3000, 0.15)],
)
def test_the_costs_of_a_machine_are_learned(
    true: StepCosts, noise: float, outliers: float, num_samples: int, largest: float
) -> None:
    steps, fit = Steps(true, noise, outliers), StepCostModel(lambda: 0.0)
    for _ in range(num_samples):
        fit.measured(steps.sample())
    assert error(fit.pace().costs, true) < largest
    assert min(fit.pace().costs) > 0


def test_hours_of_decoding_do_not_erase_prompt_costs() -> None:
    steps, fit = Steps(GPU, 0.05), StepCostModel(lambda: 0.0)
    for _ in range(500):
        fit.measured(steps.sample())
    for _ in range(20_000):
        fit.measured(steps.sample(prompts=False))
    assert error(fit.pace().costs, GPU) < 0.2


def test_a_slower_machine_is_tracked() -> None:
    fit = StepCostModel(lambda: 0.0)
    for costs in (CPU, StepCosts(*(2 * value for value in CPU))):
        steps = Steps(costs, 0.05)
        for _ in range(2000):
            fit.measured(steps.sample())
    assert error(fit.pace().costs, StepCosts(*(2 * value for value in CPU))) < 0.1


def test_tokens_per_round_are_measured() -> None:
    fit = StepCostModel(lambda: 0.0)
    assert fit.pace().tokens_per_round == 1.0
    for _ in range(500):
        fit.measured(StepSample(20.0, 0, 0, 4, 4, 4000, 12, 6))
    assert fit.pace().tokens_per_round == pytest.approx(2.5, rel=0.01)
    assert fit.pace().drafted_tokens == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("ms", [math.nan, math.inf, 0.0, -3.0])
def test_impossible_samples_are_ignored(ms: float) -> None:
    fit = StepCostModel(lambda: 0.0)
    fit.measured(StepSample(ms, 0, 0, 1, 1, 5, 0, 0))
    assert fit.pace().costs == STEP_PRIOR


@pytest.mark.parametrize(("ms", "draft_ms"), [(0.0, -1.0), (5e6, 5e6 - 1.0), (3.0, -1.0), (3.0, 4.0), (3.0, math.nan)])
def test_steps_with_an_impossible_time_of_drafting_are_ignored(ms: float, draft_ms: float) -> None:
    """Even where the difference of the two would be possible."""
    fit = StepCostModel(lambda: 0.0)
    for _ in range(30):
        fit.measured(StepSample(ms, 0, 0, 1, 1, 5, 2, 1, draft_ms=draft_ms))
    assert fit.report().costs == STEP_PRIOR


@pytest.mark.parametrize("num_before", [8, 20, 500])
def test_a_step_delayed_by_compilation_is_ignored(num_before: int) -> None:
    steps, fit, undisturbed = Steps(GPU, 0.05), StepCostModel(lambda: 0.0), StepCostModel(lambda: 0.0)
    samples = [steps.sample() for _ in range(num_before + 60)]
    for index, sample in enumerate(samples):
        undisturbed.measured(sample)
        fit.measured(sample)
        if index == num_before:
            fit.measured(sample._replace(ms=2000.0))
    assert fit.pace().costs == undisturbed.pace().costs


def test_a_much_slower_machine_is_tracked() -> None:
    slow, fit = StepCosts(*(12 * value for value in GPU)), StepCostModel(lambda: 0.0)
    for costs, num_steps in ((GPU, 500), (slow, 5000)):
        steps = Steps(costs, 0.05)
        for _ in range(num_steps):
            fit.measured(steps.sample())
    assert error(fit.pace().costs, slow) < 0.1


def verifying(ms: float, num_drafted: int, draft_ms: float = 0.0) -> StepSample:
    """A step of one sequence."""
    return StepSample(ms, 0, 0, 1, 1, 100, num_drafted, 0, draft_ms)


def test_guessing_is_no_cost_of_verifying_but_part_of_a_step() -> None:
    costs = StepCostModel(lambda: 0.0)
    for num_drafted in (0, 2, 4, 8) * 30:
        costs.measured(verifying(20 + 0.5 * num_drafted + 3 * num_drafted, num_drafted, 3 * num_drafted))
    assert costs.ms(1, 9, 100) - costs.ms(1, 1, 100) == pytest.approx(4, rel=0.1)
    assert costs.report().costs.decode_ms(1, 100, 8) == pytest.approx(20 + 8 * 3.5, rel=0.1)


def test_a_cold_pass_of_a_network_is_no_cost_of_guessing() -> None:
    costs = StepCostModel(lambda: 0.0)
    for num_drafted, draft_ms in [(4, 5000.0), *[(4, 2.0)] * 30]:
        costs.measured(verifying(20.0 + draft_ms, num_drafted, draft_ms))
    assert costs.report().costs.decode_ms(1, 100, 4) == pytest.approx(22, rel=0.1)


def test_one_cold_step_with_drafts_does_not_rule_drafts_out() -> None:
    costs = StepCostModel(lambda: 0.0)
    for _ in range(20):
        costs.measured(verifying(10.0, 0))
    costs.measured(verifying(90.0, 8))
    assert costs.ms(1, 9, 100) < 40.0


def test_what_is_reported_includes_the_last_step() -> None:
    costs = StepCostModel(lambda: 0.0)  # time stands still, so that fits are seldom due
    for count in range(1, 200):
        costs.measured(verifying(20.0, 0))
        assert costs.report().num_samples == count
