"""Times of workers on the router's clock: within what the order of events allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.timeline import Event, Timeline
from cluster.registry.clock_offset import ClockOffset
from tests.fake_clock import FakeClock

WORKER_S = {Event.PREFILL_QUEUED: 10.0, Event.FIRST_TOKEN_SAMPLED: 13.0}
"""On a clock that is 90 s behind: from 100 to 103 s here."""


def recorded(offset: ClockOffset) -> list[float]:
    timeline = Timeline("r", {Event.ROUTED: 99.5})
    offset.record(timeline, WORKER_S)
    return [timeline.events[event] for event in WORKER_S]


@pytest.mark.parametrize(
    ("measured_s", "expected_s"),
    [
        (90.0, [100.0, 103.0]),
        (90.3, [100.3, 103.3]),
        (92.0, [100.5, 103.5]),
        (88.0, [99.5, 102.5]),
        (90.0 + 3600.0, [100.5, 103.5]),
        (90.0 - 3600.0, [99.5, 102.5]),
    ],
    ids=["exact", "possible", "after its arrival", "before its cause", "jumped forwards", "jumped backwards"],
)
def test_events_stay_between_cause_and_arrival(measured_s: float, expected_s: list[float]) -> None:
    offset = ClockOffset(FakeClock(103.5))
    offset.measured(measured_s, 0.0)
    assert recorded(offset) == pytest.approx(expected_s)
    assert offset.has_arrived(13.0) == pytest.approx(expected_s[1] - 13.0)  # corrected for what comes next


def test_a_message_without_times_corrects_nothing() -> None:
    offset = ClockOffset(FakeClock(103.5))
    assert recorded_nothing(offset) == {}
    offset.measured(90.0, 0.0)
    assert recorded_nothing(offset) == {}
    assert offset.has_arrived(13.0) == 90.0


def recorded_nothing(offset: ClockOffset) -> dict[Event, float]:
    timeline = Timeline("r")
    offset.record(timeline, {})
    return timeline.events


@pytest.mark.parametrize(("offset_s", "expected_s"), [(0.4, 0.0), (-0.4, 0.0), (0.6, 0.6)])
def test_an_offset_within_the_error_is_none(offset_s: float, expected_s: float) -> None:
    offset = ClockOffset(FakeClock(100.0))
    offset.measured(offset_s, 0.5)
    assert offset.has_arrived(1.0) == expected_s


@given(st.floats(1.0, 1e7), st.floats(1.0, 1e7))
def test_no_event_is_before_its_cause_by_rounding(cause_s: float, event_s: float) -> None:
    offset, timeline = ClockOffset(FakeClock(cause_s + 1.0)), Timeline("r", {Event.ROUTED: cause_s})
    offset.measured(-1e9, 0.0)
    offset.record(timeline, {Event.PREFILL_QUEUED: event_s})
    assert 0.0 <= timeline.events[Event.PREFILL_QUEUED] - cause_s < 1e-8
