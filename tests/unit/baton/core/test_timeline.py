"""Durations that follow from a request's events."""

from __future__ import annotations

import json

import pytest

from baton.core.timeline import SPANS, Event, Timeline

# Seconds on some monotonic clock, in the order of a request that goes well.
TIMES = {event: 1000.0 + 0.5 * index for index, event in enumerate(Event)}


def complete() -> Timeline:
    timeline = Timeline("id")
    for event, at_s in TIMES.items():
        timeline.record(event, at_s)
    return timeline


def test_durations_are_milliseconds_between_their_events() -> None:
    timeline = complete()

    def ms(start: Event, end: Event) -> float:
        return (TIMES[end] - TIMES[start]) * 1e3

    assert timeline.queue_ms == pytest.approx(ms(Event.PREFILL_QUEUED, Event.PREFILL_STARTED))
    assert timeline.prefill_ms == pytest.approx(ms(Event.PREFILL_STARTED, Event.FIRST_TOKEN_SAMPLED))
    assert timeline.transfer_ms == pytest.approx(ms(Event.TRANSFER_STARTED, Event.KV_COMMITTED))
    assert timeline.ttft_ms == pytest.approx(ms(Event.RECEIVED, Event.FIRST_TOKEN))
    assert timeline.tpot_ms(11) == pytest.approx(ms(Event.FIRST_TOKEN, Event.FINISHED) / 10)
    assert timeline.tpot_ms(1) is None, "one token has no time between tokens"


def test_a_missing_event_leaves_its_durations_undefined() -> None:
    timeline = Timeline("id")
    timeline.record(Event.RECEIVED, 5.0)
    assert timeline.ttft_ms is None
    assert timeline.tpot_ms(10) is None
    assert timeline.to_dict()["spans"] == []


def test_record_keeps_the_first_time_and_replace_overwrites_it() -> None:
    timeline = Timeline("id")
    timeline.record(Event.TRANSFER_STARTED, 1.0)
    timeline.record(Event.TRANSFER_STARTED, 2.0)
    assert timeline.events[Event.TRANSFER_STARTED] == 1.0
    timeline.replace(Event.TRANSFER_STARTED, 3.0)
    assert timeline.events[Event.TRANSFER_STARTED] == 3.0


def test_the_clock_is_monotonic_by_default() -> None:
    timeline = Timeline("id")
    timeline.record(Event.RECEIVED)
    timeline.record(Event.TOKENIZED)
    duration_ms = timeline.between_ms(Event.RECEIVED, Event.TOKENIZED)
    assert duration_ms is not None
    assert 0 <= duration_ms < 1000


def test_the_waterfall_starts_at_zero_and_serializes() -> None:
    timeline = complete()
    timeline.attributes["decode_worker"] = "decode-0"
    waterfall = json.loads(json.dumps(timeline.to_dict()))
    assert waterfall["request_id"] == "id"
    assert waterfall["attributes"] == {"decode_worker": "decode-0"}
    assert waterfall["events"][0] == {"name": "received", "at_ms": 0.0}
    assert [event["at_ms"] for event in waterfall["events"]] == [500.0 * index for index in range(len(Event))]
    assert {span["name"] for span in waterfall["spans"]} == {name for name, _, _ in SPANS}
    total = next(span for span in waterfall["spans"] if span["name"] == "total")
    assert total == {"name": "total", "start_ms": 0.0, "duration_ms": 500.0 * list(Event).index(Event.FINISHED)}


def test_the_waterfall_lists_events_in_order_of_time() -> None:
    timeline = Timeline("id")
    timeline.record(Event.FINISHED, 3.0)
    timeline.record(Event.FIRST_TOKEN, 2.0)
    events = timeline.to_dict()["events"]
    assert events == [{"name": "first_token", "at_ms": 0.0}, {"name": "finished", "at_ms": 1000.0}]
