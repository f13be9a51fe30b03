"""The store of timelines is bounded and finds the sequences of a request."""

from __future__ import annotations

import pytest

from baton.core.errors import NotFoundError
from baton.core.request_ids import new_warmup_id, owned_id
from baton.core.timeline import Event, Timeline
from baton.explain.timelines import TimelineStore


def timeline(request_id: str, group: str | None = None) -> Timeline:
    entry = Timeline(request_id, group=group)
    entry.record(Event.RECEIVED, 1.0)
    return entry


def test_the_store_keeps_the_newest_timelines():
    store = TimelineStore(3)
    for number in range(10):
        store.add(timeline(f"r{number}"))
    assert [number for number in range(10) if store.to_dict(f"r{number}")] == [7, 8, 9]


def test_the_store_can_keep_no_timelines():
    store = TimelineStore(0)
    store.add(timeline("r"))
    assert store.to_dict("r") is None


def test_a_reused_id_replaces_its_timeline_and_counts_as_new():
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


def test_a_request_with_several_sequences_shows_all_of_them():
    store = TimelineStore(10)
    for index in range(3):
        store.add(timeline(f"r-{index}", "r"))
    store.add(timeline("r-3"))  # another client's request with a similar id
    found = store.to_dict("r")
    assert found is not None
    assert [sequence["request_id"] for sequence in found["sequences"]] == ["r-0", "r-1", "r-2"]
    assert store.to_dict("other") is None


def test_a_request_with_more_sequences_than_are_kept_shows_the_first_kept_ones():
    store = TimelineStore(20)
    for index in range(40):
        store.add(timeline(f"r-{index}", "r"))
    assert [entry["request_id"] for entry in store.find("r")["sequences"]] == [f"r-{index}" for index in range(20, 36)]


def test_the_store_knows_which_ids_it_holds():
    store = TimelineStore(4)
    for entry in (timeline("one"), timeline("r-0", "r"), timeline("r-1", "r"), timeline("job-0")):
        store.add(entry)
    assert [name for name in ("one", "r", "r-0", "r-1", "job-0") if not store.keeps(name)] == []
    assert [name for name in ("job", "r-2", "one-0", "on") if store.keeps(name)] == []
    store.add(timeline("next"))
    assert not store.keeps("one")


def test_a_stored_timeline_shows_later_events():
    store = TimelineStore(10)
    entry = timeline("r")
    store.add(entry)
    entry.record(Event.FINISHED, 1.5)
    found = store.to_dict("r")
    assert found is not None
    assert found["spans"] == [{"name": "total", "start_ms": 0.0, "duration_ms": 500.0}]


def finished(request_id: str, total_s: float) -> Timeline:
    entry = timeline(request_id)
    entry.record(Event.FINISHED, 1.0 + total_s)
    return entry


def test_an_unknown_id_says_how_many_are_kept():
    store = TimelineStore(7)
    store.add(timeline("r"))
    with pytest.raises(NotFoundError, match=r"'other'.*last 7 sequences"):
        store.find("other")


def test_the_listing_is_sorted_by_age_or_time():
    store = TimelineStore(10)
    for request_id, total_s in (("a", 2.0), ("b", 3.0), ("c", 1.0)):
        store.add(finished(request_id, total_s))
    assert [entry["request_id"] for entry in store.listing("newest", 2)] == ["c", "b"]
    assert [entry["request_id"] for entry in store.listing("slowest", 2)] == ["b", "a"]
    assert store.listing("slowest", 1)[0]["total_ms"] == 3000.0


def test_the_slowest_first_tokens_are_listed():
    store = TimelineStore(10)
    for request_id, first_token_s, total_s in (
        ("a", 0.5, 9.0),
        ("b", 2.0, 3.0),
        ("c", None, 8.0),
        ("warmup-1", 5.0, 6.0),
    ):
        entry = finished(request_id, total_s)
        if first_token_s is not None:
            entry.record(Event.FIRST_TOKEN, 1.0 + first_token_s)
        store.add(entry)
    assert [entry["request_id"] for entry in store.listing("slowest_first_token", 2)] == ["b", "a"]


def test_a_warm_up_is_the_slowest_only_without_others():
    """The first requests after a start are slow, and no user asks why."""
    store = TimelineStore(10)
    for request_id in (new_warmup_id(), owned_id("tag", f"{new_warmup_id()}-1"), "warm"):
        store.add(finished(request_id, 1.0 if request_id == "warm" else 9.0))
    slowest = store.listing("slowest", 3)
    assert (slowest[0]["request_id"], slowest[1]["total_ms"]) == ("warm", 9000.0)
    assert store.listing("newest", 1)[0]["request_id"] == "warm"


def test_stages_and_blame_come_with_the_events():
    store = TimelineStore(1)
    store.add(finished("r", 2.0))
    found = store.find("r")
    assert sum(stage["duration_ms"] for stage in found["stages"]) == found["total_ms"] == 2000.0
    assert found["time_to_first_token"] is None


def test_a_request_with_many_sequences_shows_the_first_and_each_on_its_own():
    store = TimelineStore(100)
    for index in range(40):
        store.add(timeline(f"r-{index}", "r"))
    found = store.to_dict("r")
    assert found is not None
    assert [entry["request_id"] for entry in found["sequences"]] == [f"r-{index}" for index in range(16)]
    assert store.to_dict("r-39") is not None


def test_an_owner_finds_its_own_requests_only():
    store = TimelineStore(10)
    for entry in (timeline("a:order-1"), timeline("b:order-1"), timeline("b:many-0", "b:many"), timeline("open")):
        store.add(entry)
    assert store.find("order-1", "a")["request_id"] == "order-1"
    assert [entry["request_id"] for entry in store.find("many", "b")["sequences"]] == ["many-0"]
    messages = set()
    for name in ("many", "many-0", "open", "b:order-1", "a:order-1", "unknown"):
        with pytest.raises(NotFoundError) as caught:
            store.find(name, "a")
        messages.add(caught.value.message.replace(name, "ID"))
    assert len(messages) == 1


def test_without_an_owner_the_newest_request_of_that_id_is_found():
    store = TimelineStore(10)
    for entry in (timeline("a:order-1"), timeline("b:order-1"), timeline("b:many-0", "b:many"), timeline("open")):
        store.add(entry)
    assert store.find("order-1")["request_id"] == "b:order-1"
    assert store.find("a:order-1")["request_id"] == "a:order-1"
    assert store.find("many")["request_id"] == "b:many"
    assert store.find("open")["request_id"] == "open"
    with pytest.raises(NotFoundError):
        store.find("order")
