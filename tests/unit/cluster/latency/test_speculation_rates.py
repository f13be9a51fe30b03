"""Tokens a round: what is asked again is not computed again, and yet never old."""

from __future__ import annotations

from baton.core.step_samples import StepSample
from cluster.latency.cost_table import SpeculationRates


def step(decoding: int, drafted: int, accepted: int) -> StepSample:
    return StepSample(10.0, 0, 0, decoding, decoding, 100, drafted, accepted)


def test_a_step_shows_in_the_next_answer():
    rates = SpeculationRates()
    before = rates.rates(4)
    rates.observe(step(4, 12, 8))
    assert rates.rates(4)[0] > before[0]


def test_what_a_neighbour_of_the_same_kind_measures_shows_too():
    group = SpeculationRates()
    here, there = SpeculationRates(group), SpeculationRates(group)
    before = here.rates(4)
    there.observe(step(4, 12, 8))
    assert here.rates(4)[0] > before[0]
    assert here.rates(4) == here.rates(7)  # batches of one size class


def test_sizes_are_told_apart():
    rates = SpeculationRates()
    for _ in range(50):
        rates.observe(step(1, 4, 4))
        rates.observe(step(16, 16, 0))
    assert rates.rates(1)[0] > rates.rates(16)[0]
