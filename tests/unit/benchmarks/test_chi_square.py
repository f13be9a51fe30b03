"""The chi-square test that other tests rely on."""

from __future__ import annotations

import random

import pytest

from benchmarks.losslessness import chi_square

_UNIFORM = dict.fromkeys(range(6), 1 / 6)


def test_p_values_match_the_published_table() -> None:
    """Upper 5 % points of the distribution, from any table."""
    for freedom, statistic in ((1, 3.841), (4, 9.488), (5, 11.070)):
        cells = freedom + 1
        # All the deviation in two cells: 2 · d² / mean.
        deviation = round((statistic / 2 * 1e6) ** 0.5)
        counts = dict.fromkeys(range(cells), 1000000)
        counts[0] += deviation
        counts[1] -= deviation
        result = chi_square(counts, dict.fromkeys(range(cells), 1 / cells))
        assert result.degrees_of_freedom == freedom
        assert result.p_value == pytest.approx(0.05, abs=1e-4)


def test_fair_dice_pass_and_loaded_dice_fail() -> None:
    chance = random.Random(1)
    fair = [chance.randrange(6) for _ in range(6000)]
    loaded = [chance.choice([0, 1, 2, 3, 4, 5, 5]) for _ in range(6000)]
    assert chi_square({face: fair.count(face) for face in range(6)}, _UNIFORM).p_value > 0.01
    assert chi_square({face: loaded.count(face) for face in range(6)}, _UNIFORM).p_value < 1e-6


def test_rare_outcomes_are_pooled_and_impossible_ones_fail() -> None:
    expected = {"often": 0.99, "rare": 0.006, "rarer": 0.004}
    assert chi_square({"often": 99, "rare": 1}, expected).degrees_of_freedom == 1
    assert chi_square({"often": 990, "rare": 6, "rarer": 4}, expected).p_value == pytest.approx(1)
    assert chi_square({"often": 100, "never": 1}, expected).p_value == 0
