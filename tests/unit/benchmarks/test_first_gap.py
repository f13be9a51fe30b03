"""What a request notices of the hand-off: the first gap less the usual one, against its prompt's prefill."""

from __future__ import annotations

import pytest

from benchmarks.first_gap import Run, figures


def test_what_the_hand_off_adds_is_the_first_gap_less_the_usual_one() -> None:
    run = Run(first_token_ms=120.0, prefill_ms=100.0, gaps_ms=(15.0, 10.0, 9.0, 50.0))
    assert run.visible_ms == pytest.approx(5.0)
    assert run.share == pytest.approx(0.05)


def test_figures_are_medians_of_the_requests() -> None:
    runs = [Run(100.0, 80.0, (10.0 + extra, 10.0, 10.0)) for extra in (0.0, 4.0, 40.0)]
    found = figures(runs)
    assert found["first_gap_ms"] == pytest.approx(14.0)
    assert found["usual_gap_ms"] == pytest.approx(10.0)
    assert found["visible_ms"] == pytest.approx(4.0)
    assert found["visible_of_prefill"] == pytest.approx(0.05)
