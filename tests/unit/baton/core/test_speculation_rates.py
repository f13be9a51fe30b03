"""Tokens per step, by size of the batch."""

from __future__ import annotations

import pytest

from baton.core.speculation_rates import RateSums, SpeculationRates


def test_a_step_shows_in_the_next_answer() -> None:
    rates = SpeculationRates()
    before = rates.rates(4)
    rates.observe(4, 12, 8)
    assert rates.rates(4)[0] > before[0] == 1.0


def test_rates_measured_elsewhere_count_where_there_are_few() -> None:
    here = SpeculationRates()
    assert here.rates(4, (2.5, 3.0)) == (2.5, 3.0)
    for _ in range(300):
        here.observe(4, 4, 4)
    assert here.rates(4, (2.5, 3.0)) == pytest.approx((1.0, 1.0), rel=0.1)


def test_sizes_are_told_apart() -> None:
    rates = SpeculationRates()
    for _ in range(50):
        rates.observe(1, 5, 4)
        rates.observe(16, 16, 16)
    assert rates.rates(1)[0] > rates.rates(0)[0] > rates.rates(16)[0]
    assert rates.rates(16) == rates.rates(31)  # batches of one size class


@pytest.mark.parametrize(("decoding", "emitted", "drafted"), [(0, 0, 0), (4, 3, 0), (4, 4, -1), (-1, 5, 1)])
def test_impossible_steps_change_nothing(decoding: int, emitted: int, drafted: int) -> None:
    rates = SpeculationRates()
    rates.observe(decoding, emitted, drafted)
    assert not rates.sums


def test_a_mean_of_rates_keeps_sizes_that_one_side_lacks() -> None:
    old, new = (
        SpeculationRates({0: RateSums(10, 10, 0), 1: RateSums(10, 10, 0)}),
        SpeculationRates({0: RateSums(10, 20, 10)}),
    )
    mixed = old.moved_to(new, 0.5)
    assert mixed.sums == {0: RateSums(10, 15, 5), 1: RateSums(10, 10, 0)}
