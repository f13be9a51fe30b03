"""What longer contexts add, on a machine whose speed is another in each round."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import count

from rich.console import Console

from benchmarks.context_slopes import Slope, measure_slopes, show_slopes


def by_round(values: list[float]) -> Callable[[], float]:
    """Gives them one after the other, behind those of two rounds that warm up."""
    number = count()
    return lambda: [0.0, 0.0, *values][next(number)]


def test_each_round_has_its_own_bandwidth() -> None:
    steps = {300: by_round([50, 100, 50]), 100: by_round([20, 40, 20]), 400: by_round([80, 160, 95])}
    found = measure_slopes(8, steps, by_round([1e6, 0.5e6, 1e6]), kv_bytes_per_token=5, rounds=3)
    assert found == [
        Slope(8, 100, 300, [30, 60, 30], [8, 16, 8]),
        Slope(8, 300, 400, [30, 60, 45], [4, 8, 4]),
        Slope(8, 100, 400, [60, 120, 75], [12, 24, 12]),
    ]
    assert [slope.ratio for slope in found] == [3.75, 7.5, 5.0]
    assert found[1].ratios == [7.5, 7.5, 11.25]


def test_one_context_adds_nothing() -> None:
    assert measure_slopes(1, {100: by_round([1])}, by_round([1]), 5, 1) == []


def test_two_contexts_are_one_slope_and_are_shown() -> None:
    (slope,) = measure_slopes(2, {1: by_round([1.0]), 11: by_round([3.0])}, by_round([1e6]), 50, 1)
    assert slope == Slope(2, 1, 11, [2.0], [1.0])
    written = io.StringIO()
    show_slopes([slope], Console(width=100, file=written))
    assert re.search(r"2 +│ 1 → 11 +│ 2.0 +│ 1.0 +│ 2.00 +│ 2.00 to 2.00", written.getvalue())
