"""Attainment and goodput over sliding windows, in bounded memory."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.telemetry.attainment import WINDOWS, AttainmentTracker, SlidingWindow
from tests.fake_clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


def test_an_empty_window_has_no_attainment(clock: FakeClock) -> None:
    figures = SlidingWindow(60.0, clock).read()
    assert (figures.num_requests, figures.attainment, figures.goodput) == (0, None, 0.0)


def test_attainment_and_goodput_count_requests_that_met_their_targets(clock: FakeClock) -> None:
    window = SlidingWindow(60.0, clock)
    for second in range(30):
        clock.now_s = 1000.0 + second
        window.add(met=second % 3 != 0)
    clock.now_s = 1030.0
    figures = window.read()
    assert (figures.num_requests, figures.num_met) == (30, 20)
    assert figures.attainment == pytest.approx(2 / 3)
    assert figures.goodput == pytest.approx(20 / 30), "per second since the window is there"


def test_goodput_is_steady_once_the_window_is_full(clock: FakeClock) -> None:
    window = SlidingWindow(60.0, clock)
    for tenth in range(6000):
        clock.now_s = 1000.0 + tenth / 10
        window.add(met=True)
    assert window.read().goodput == pytest.approx(10.0, rel=0.02)


def test_a_request_right_after_the_start_does_not_give_a_huge_rate(clock: FakeClock) -> None:
    window = SlidingWindow(60.0, clock)
    clock.now_s += 0.001
    window.add(met=True)
    assert window.read().goodput == 1.0


def test_old_requests_are_forgotten_after_a_long_silence(clock: FakeClock) -> None:
    window = SlidingWindow(60.0, clock)
    window.add(met=True)
    clock.now_s += 59.0
    assert window.read().num_requests == 1
    clock.now_s += 1.0
    assert window.read().num_requests == 0
    clock.now_s += 1e6
    window.add(met=False)
    assert (window.read().num_requests, window.read().num_met) == (1, 0)


@given(
    window_s=st.sampled_from([6.0, 60.0, 300.0]),
    began_s=st.floats(0, 1e6),
    events=st.lists(st.tuples(st.floats(0, 40.0), st.booleans()), max_size=60),
    silence_s=st.floats(0, 100.0),
)
def test_the_window_is_exact_to_one_bucket(window_s, began_s, events, silence_s):
    """Everything of the last 59/60 of the window is counted, and nothing that is older than the window."""
    clock = FakeClock(began_s)
    window = SlidingWindow(window_s, clock)
    times: list[tuple[float, bool]] = []
    for pause_s, met in events:
        clock.now_s += pause_s
        window.add(met=met)
        times.append((clock.now_s, met))
    clock.now_s += silence_s
    figures = window.read()
    slack_s = 1e-6 * max(1.0, clock.now_s / 1e3)
    surely = [met for at_s, met in times if at_s > clock.now_s - window_s * 59 / 60 + slack_s]
    perhaps = [met for at_s, met in times if at_s >= clock.now_s - window_s - slack_s]
    assert len(surely) <= figures.num_requests <= len(perhaps)
    assert sum(surely) <= figures.num_met <= sum(perhaps)
    assert 1.0 <= figures.span_s <= window_s + slack_s
    assert window.read() == figures, "reading changes nothing"


def test_memory_does_not_grow_with_requests_or_time(clock: FakeClock) -> None:
    tracker = AttainmentTracker(["a", "b"], clock)

    def size() -> int:
        windows = [window for by_name in tracker._windows.values() for window in by_name.values()]
        return sum(sys.getsizeof(counts) for window in windows for counts in vars(window).values())

    before = size()
    for _ in range(20_000):
        clock.now_s += 0.7
        tracker.add("a", met=True)
    assert size() == before


def test_classes_and_windows_are_counted_separately(clock: FakeClock) -> None:
    tracker = AttainmentTracker(["a", "b"], clock)
    tracker.add("a", met=True)
    clock.now_s += 120.0
    tracker.add("b", met=False)
    figures = tracker.read()
    assert {name: {w: f.num_requests for w, f in windows.items()} for name, windows in figures.items()} == {
        "a": {"1m": 0, "5m": 1, "1h": 1},
        "b": {"1m": 1, "5m": 1, "1h": 1},
    }
    assert figures["a"]["5m"].attainment == 1.0
    assert figures["b"]["1m"].attainment == 0.0
    assert list(figures["a"]) == list(WINDOWS)
    with pytest.raises(KeyError):
        tracker.add("c", met=True)
