"""The arithmetic of drafts: expected tokens, the speed-up by length, its peak and cliff, and the advice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.draft_payoff import MAX_LENGTH, Acceptance, advise_length, payoff_curve, speedup


def curve_of(alpha: float, cost: float):
    return payoff_curve(Acceptance((alpha,)), cost)


def test_the_example_of_the_documentation():
    curve = curve_of(0.7, 0.15)
    assert [round(gain, 2) for gain in curve.speedups[:8]] == [1.48, 1.68, 1.75, 1.73, 1.68, 1.61, 1.53, 1.45]
    assert curve.peak == 3
    assert round(curve.acceptance.expected_tokens(5), 2) == 2.94
    assert len(curve.speedups) == MAX_LENGTH
    assert (curve.largest_useful, curve.cliff) == (15, 16)


@given(st.floats(0.0, 0.999), st.integers(1, MAX_LENGTH))
def test_the_sum_is_the_closed_form(alpha: float, length: int):
    expected = (1 - alpha ** (length + 1)) / (1 - alpha)
    assert Acceptance((alpha,)).expected_tokens(length) == pytest.approx(expected)


@pytest.mark.parametrize(("alpha", "tokens"), [(1.0, 6.0), (0.0, 1.0)])
def test_certain_drafts_are_all_accepted_and_impossible_ones_never(alpha: float, tokens: float):
    assert Acceptance((alpha,)).expected_tokens(5) == tokens


def test_a_free_certain_draft_is_as_long_as_possible():
    curve = curve_of(1.0, 0.0)
    assert (curve.peak, curve.cliff, curve.largest_useful) == (MAX_LENGTH, None, MAX_LENGTH)


def test_acceptance_that_falls_with_depth_shortens_the_best_draft():
    falling = payoff_curve(Acceptance((0.7, 0.5, 0.3)), 0.15)
    assert falling.acceptance.expected_tokens(4) == pytest.approx(1 + 0.7 + 0.35 + 0.105 + 0.0315)
    assert falling.peak < curve_of(0.7, 0.15).peak


def test_a_dearer_draft_is_shorter_until_none_pays():
    peaks = [curve_of(0.7, cost).peak for cost in (0.05, 0.15, 0.3, 0.75)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == 0
    dear = curve_of(0.7, 0.75)
    assert (dear.peak_speedup, dear.cliff, dear.largest_useful) == (1.0, 1, 0)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), st.floats(0.0, 2.0))
def test_nothing_beyond_the_cliff_is_useful(chances: list[float], cost: float):
    curve = payoff_curve(Acceptance(tuple(chances)), cost)
    assert curve.speedups == tuple(speedup(curve.acceptance, cost, k) for k in range(1, MAX_LENGTH + 1))
    if curve.cliff is not None:
        assert curve.largest_useful < curve.cliff
    assert (curve.peak == 0) == (curve.largest_useful == 0)


@pytest.mark.parametrize(
    ("alpha", "cost", "thumb", "length"),
    [
        (0.9, 0.2, (5, 7), 7),
        (0.82, 0.1, (4, 6), 6),
        (0.7, 0.15, (3, 5), 3),
        (0.55, 0.1, (1, 3), 3),
        (0.55, 0.6, (1, 3), 0),
        (0.4, 0.05, None, 0),
    ],
)
def test_advice_follows_acceptance_and_cost(alpha: float, cost: float, thumb: tuple[int, int] | None, length: int):
    advice = advise_length(alpha, curve_of(alpha, cost))
    assert (advice.rule_of_thumb, advice.length) == (thumb, length)
    assert f"{alpha:.2f}" in advice.text
    assert ("do not speculate" in advice.text) == (length == 0)


@pytest.mark.parametrize(
    ("chances", "cost", "message"),
    [((), 0.1, "first position"), ((1.2,), 0.1, "between 0 and 1, got 1.2"), ((0.5,), -1.0, "from 0 on, got -1")],
)
def test_impossible_figures_are_refused(chances: tuple[float, ...], cost: float, message: str):
    with pytest.raises(ValueError, match=message):
        payoff_curve(Acceptance(chances), cost)
