"""A request's states and its observers."""

from __future__ import annotations

import logging

import pytest

from baton.core.errors import WorkerLostError
from cluster.requests.request_observers import RequestObserver, RequestObservers
from cluster.requests.request_record import RequestRecord, RequestState
from tests.fake_workers import FakeCluster, failing
from tests.request_records import make_record


class Broken(RequestObserver):
    """Raises at every event of a request."""

    def arrived(self, record: RequestRecord) -> None:
        raise RuntimeError("broken")

    accepted = placed = first_token = ended = arrived

    def tokens(self, record: RequestRecord, num_tokens: int) -> None:
        raise RuntimeError("broken")


class Listener(RequestObserver):
    """Keeps the names of the events, and how many tokens each brought."""

    def __init__(self) -> None:
        self.events: list[str | int] = []

    def arrived(self, record: RequestRecord) -> None:
        self.events.append("arrived")

    def accepted(self, record: RequestRecord) -> None:
        self.events.append("accepted")

    def placed(self, record: RequestRecord) -> None:
        self.events.append("placed")

    def first_token(self, record: RequestRecord) -> None:
        self.events.append("first_token")

    def tokens(self, record: RequestRecord, num_tokens: int) -> None:
        self.events.append(num_tokens)

    def attempt_failed(self, record: RequestRecord, error: object) -> None:
        self.events.append("attempt_failed")

    def ended(self, record: RequestRecord) -> None:
        self.events.append(f"ended: {record.outcome}")


async def test_observers_get_every_event_in_order_over_several_attempts() -> None:
    listener = Listener()
    async with FakeCluster(observers=[listener]) as cluster:
        prefill, _ = await cluster.add_all(["p1", "d1"])
        prefill.scripts.append(failing(WorkerLostError("gone")))
        await cluster.run(cluster.request(max_tokens=3))
    expected = ["arrived", "accepted", "placed", "attempt_failed", "placed", "first_token", 1, 1, 1, "ended: length"]
    assert listener.events == expected


async def test_a_failing_observer_affects_neither_the_request_nor_other_observers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = Listener()
    async with FakeCluster(observers=[Broken(), listener]) as cluster:
        await cluster.add_all(["p1", "d1"])
        with caplog.at_level(logging.ERROR):
            tokens = await cluster.run(cluster.request("unlucky", max_tokens=2))
    assert len(tokens) == 2
    assert listener.events == ["arrived", "accepted", "placed", "first_token", 1, 1, "ended: length"]
    failures = [entry for entry in caplog.records if entry.message == "an observer of requests failed"]
    assert len(failures) == len(listener.events)
    assert {entry.request_id for entry in failures} == {"unlucky"}  # type: ignore[attr-defined]


def test_events_not_overridden_by_an_observer_cost_nothing() -> None:
    observers = RequestObservers([RequestObserver(), Listener()])
    assert len(observers._tokens) == 1
    assert observers._handed_off == []


@pytest.mark.parametrize("state", [RequestState.PLACED, RequestState.STREAMING, RequestState.ARRIVED])
def test_an_invalid_state_transition_is_refused(state: RequestState) -> None:
    record = make_record()
    with pytest.raises(RuntimeError, match=f"cannot go from arrived to {state}"):
        record.change_state(state)


def test_a_request_ends_once() -> None:
    record = make_record()
    record.change_state(RequestState.ENDED)
    with pytest.raises(RuntimeError, match="cannot go from ended"):
        record.change_state(RequestState.ENDED)
