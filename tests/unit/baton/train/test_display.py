"""Progress appears on terminals and in logs, with the remaining time."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from baton.train import display
from baton.train.display import Display
from baton.train.trainer import Progress
from tests.fake_clock import FakeClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=made))
    return made


def training(progress: float, loss: float) -> Progress:
    return Progress("training", progress, 40, 1, loss, (0.61, 0.42), 1e-3, 0.5, 812.0, 3725.0)


def test_progress_lines_are_written_at_intervals(clock: FakeClock) -> None:
    screen = io.StringIO()
    with Display(Console(file=screen, width=200)) as shown:
        shown.collected(1000, 10_000)
        clock.now_s += 4
        shown.collected(2000, 10_000)
        clock.now_s += 6
        shown.collected(3000, 10_000)
        shown.progressed(Progress("held_out", loss=2.5, agreement=(0.5, 0.25)))
        shown.progressed(training(0.25, 1.5))
        shown.progressed(training(0.26, 1.4))
    assert screen.getvalue().splitlines() == [
        "collecting answers: 10%, 1,000 tokens, 0 tokens/s",
        "collecting answers: 30%, 3,000 tokens, 200 tokens/s, 35 s left",
        "training: 25%, step 40, loss 1.500, top-1 61% 42%, held out 2.500 (50% 25%), 812 tokens/s, 1 h 02 min left",
    ]


def test_a_terminal_shows_progress_bars() -> None:
    screen = io.StringIO()
    with Display(Console(file=screen, width=200, force_terminal=True)) as shown:
        shown.collected(5000, 10_000)
        shown.progressed(training(0.25, 1.5))
        shown.progressed(Progress("evaluation", progress=0.5))
    text = screen.getvalue()
    for expected in ("collecting answers", "training", "loss 1.500", "evaluating", "50%"):
        assert expected in text
