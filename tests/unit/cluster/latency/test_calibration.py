"""What factors learn from outcomes, whatever these are."""

from __future__ import annotations

import random
from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.latency.calibration import Calibration, ErrorWindow, RegimeCalibration, SlidingMedian

WINDOW = 48
Pairs = list[tuple[float, float]]

anything = st.floats() | st.sampled_from([0.0, -1.0, inf, -inf, nan])
milliseconds = st.floats(1e-3, 1e6)
outcomes = st.lists(st.tuples(milliseconds, milliseconds), max_size=WINDOW)


def learned(pairs: Pairs, elsewhere: Calibration | None = None) -> Calibration:
    calibration = Calibration(elsewhere)
    for predicted_ms, actual_ms in pairs:
        calibration.observe(predicted_ms, actual_ms)
    return calibration


@given(st.lists(st.tuples(anything, anything), max_size=100))
def test_a_factor_is_always_finite_and_positive(pairs: Pairs) -> None:
    calibration = learned(pairs)
    assert 0.25 * (1 - 1e-9) <= calibration.factor <= 4.0 * (1 + 1e-9)
    assert isfinite(calibration.spread)
    assert calibration.spread >= 0.0


@given(outcomes, st.sampled_from([(nan, 1.0), (1.0, nan), (0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (inf, 1.0), (1.0, inf)]))
def test_impossible_observations_are_ignored(pairs: Pairs, wrong: tuple[float, float]) -> None:
    calibration = learned(pairs)
    before = calibration.factor, calibration.spread
    calibration.observe(*wrong)
    assert (calibration.factor, calibration.spread) == before


@given(outcomes, st.integers(0, 99))
def test_the_order_within_the_window_does_not_matter(pairs: Pairs, seed: int) -> None:
    shuffled = learned(random.Random(seed).sample(pairs, len(pairs)))
    assert (shuffled.factor, shuffled.spread) == pytest.approx((learned(pairs).factor, learned(pairs).spread))


@given(outcomes, st.floats(1e-2, 1e2))
def test_only_ratios_matter(pairs: Pairs, unit: float) -> None:
    scaled = learned([(unit * predicted_ms, unit * actual_ms) for predicted_ms, actual_ms in pairs])
    assert scaled.factor == pytest.approx(learned(pairs).factor)


@given(outcomes)
def test_overestimates_mirror_underestimates(pairs: Pairs) -> None:
    mirrored = learned([(actual_ms, predicted_ms) for predicted_ms, actual_ms in pairs])
    assert mirrored.factor * learned(pairs).factor == pytest.approx(1.0)


@given(st.floats(0.3, 3.5), st.integers(1, WINDOW))
def test_one_repeated_ratio_is_approached_from_one_and_never_passed(ratio: float, count: int) -> None:
    fewer, more = learned([(100.0, 100.0 * ratio)] * (count - 1)), learned([(100.0, 100.0 * ratio)] * count)
    low, high = sorted([fewer.factor, ratio])
    assert low * (1 - 1e-9) <= more.factor <= high * (1 + 1e-9)
    assert more.spread <= fewer.spread + 1e-9  # every one came as the others did


@given(outcomes, st.lists(st.floats(0.5, 2.0), min_size=WINDOW, max_size=WINDOW))
def test_observations_outside_the_window_are_forgotten(old: Pairs, ratios: list[float]) -> None:
    new = [(10.0, 10.0 * ratio) for ratio in ratios]
    assert learned([*old, *new]).factor == pytest.approx(learned(new).factor)


@given(st.lists(st.floats(0.8, 1.25), min_size=25, max_size=25), st.lists(milliseconds, max_size=20))
def test_a_minority_of_outliers_changes_nothing(ratios: list[float], strange_ms: list[float]) -> None:
    pairs = [(10.0, 10.0 * ratio) for ratio in ratios] + [(10.0, actual_ms) for actual_ms in strange_ms]
    assert min(1.0, *ratios) * (1 - 1e-9) <= learned(pairs).factor <= max(1.0, *ratios) * (1 + 1e-9)


@given(outcomes, outcomes)
def test_regimes_without_observations_start_from_the_factor_learned_elsewhere(there: Pairs, here: Pairs) -> None:
    elsewhere = learned(there)
    assert learned([], elsewhere).factor == pytest.approx(elsewhere.factor)
    own, without = learned(here, elsewhere), learned(here)
    if elsewhere.factor >= 1.0:
        assert own.factor >= without.factor * (1 - 1e-9)
    else:
        assert own.factor <= without.factor * (1 + 1e-9)


@given(st.sampled_from([(False, False), (True, False), (False, True), (True, True)]), outcomes)
def test_regimes_learn_separately_except_that_local_prompts_start_from_the_others(
    regime: tuple[bool, bool], pairs: Pairs
) -> None:
    regimes = RegimeCalibration()
    contended, local = regime
    for pair in pairs:
        regimes.of(contended=contended, local=local).observe(*pair)
    own = learned(pairs).factor
    assert regimes.of(contended=contended, local=local).factor == pytest.approx(own)
    assert regimes.of(contended=True).factor == pytest.approx(own if contended and not local else 1.0)
    assert regimes.of(contended=False).factor == pytest.approx(own if not contended and not local else 1.0)
    expected = own if local or not contended else 1.0
    assert regimes.of(contended=True, local=True).factor == pytest.approx(expected)


@given(st.lists(st.floats(-1e6, 1e6) | st.sampled_from([inf, -inf, nan]), max_size=60))
def test_a_sliding_median_is_a_recent_value_or_between_two(values: list[float]) -> None:
    sliding = SlidingMedian(7.0, window=8)
    for value in values:
        sliding.observe(value)
    last = [value for value in values if isfinite(value)][-8:]
    assert min(last, default=7.0) <= sliding.value <= max(last, default=7.0)


@given(st.lists(st.tuples(anything, anything), max_size=40), st.floats(0.0, 1.0))
def test_quantiles_of_errors_are_observed_errors(pairs: Pairs, share: float) -> None:
    window = ErrorWindow(window=16)
    for predicted_ms, actual_ms in pairs:
        window.observe(predicted_ms, actual_ms)
    found = window.quantile(share)
    assert (found is None) == (len(window) == 0)
    assert len(window) <= 16
    if found is not None:
        assert found >= 0.0
        assert window.quantile(0.0) <= found <= window.quantile(1.0)  # type: ignore[operator]
