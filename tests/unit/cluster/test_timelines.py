"""The store of timelines is bounded and finds the sequences of a request."""

from __future__ import annotations

from cluster.timelines import TimelineStore
from engine.timeline import Event, Timeline


def timeline(request_id: str) -> Timeline:
    entry = Timeline(request_id)
    entry.record(Event.RECEIVED, 1.0)
    return entry


def test_it_keeps_the_newest():
    store = TimelineStore(3)
    for number in range(10):
        store.add(timeline(f"r{number}"))
    assert [number for number in range(10) if store.to_dict(f"r{number}")] == [7, 8, 9]


def test_it_can_keep_none():
    store = TimelineStore(0)
    store.add(timeline("r"))
    assert store.to_dict("r") is None


def test_an_id_that_comes_back_replaces_its_timeline_and_counts_as_new():
    store = TimelineStore(2)
    store.add(timeline("a"))
    store.add(timeline("b"))
    again = timeline("a")
    again.attributes["attempt"] = 2
    store.add(again)
    store.add(timeline("c"))
    found = store.to_dict("a")
    assert found is not None
    assert found["attributes"] == {"attempt": 2}
    assert store.to_dict("b") is None


def test_a_request_with_several_sequences_shows_them_all():
    store = TimelineStore(10)
    for index in range(3):
        store.add(timeline(f"r-{index}"))
    found = store.to_dict("r")
    assert found is not None
    assert [sequence["request_id"] for sequence in found["sequences"]] == ["r-0", "r-1", "r-2"]
    assert store.to_dict("other") is None


def test_it_shows_what_happens_after_it_was_added():
    store = TimelineStore(10)
    entry = timeline("r")
    store.add(entry)
    entry.record(Event.FINISHED, 1.5)
    found = store.to_dict("r")
    assert found is not None
    assert found["spans"] == [{"name": "total", "start_ms": 0.0, "duration_ms": 500.0}]
