"""How a node leaves its cluster, with a head that answers from memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from baton.core.errors import ConfigError, DeadlineError, WorkerLostError
from cluster.nodes import node_leaving
from cluster.nodes.node_leaving import leave_cluster
from cluster.nodes.ray_head import HeadNodes
from tests.fake_clock import FakeClock

HERE, ELSEWHERE = "10.0.0.2", "10.0.0.3"


class FakeHead:
    """A head with a node here and one elsewhere. A drained node leaves after ``leaves_after_s``."""

    address = "10.0.0.1:6379"

    def __init__(self, clock: FakeClock, leaves_after_s: float = 3.0) -> None:
        self.others = {"aa": HERE, "bb": ELSEWHERE}
        self.drained: dict[str, float] = {}
        self.ends_at_s = float("inf")
        self.announces_at_s = float("inf")
        self.silent: Callable[[float], bool] = lambda now_s: False
        self._clock = clock
        self._leaves_after_s = leaves_after_s

    def _answer(self) -> None:
        if self._clock() >= self.ends_at_s or self.silent(self._clock()):
            raise WorkerLostError("No Ray head answers.")

    def nodes(self) -> HeadNodes:
        self._answer()
        gone = {node for node, since_s in self.drained.items() if self._clock() >= since_s + self._leaves_after_s}
        return HeadNodes("cc", {node: address for node, address in self.others.items() if node not in gone})

    def drain(self, node_id: str, timeout_s: float) -> None:
        self._answer()
        self.drained[node_id] = self._clock()

    def is_ending(self) -> bool:
        self._answer()
        return self._clock() >= self.announces_at_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()

    def advance(seconds: float) -> None:
        clock.now_s += seconds

    monkeypatch.setattr(node_leaving, "time", SimpleNamespace(monotonic=clock, sleep=advance))
    return clock


def leave(head: FakeHead, timeout_s: float = 600.0, address: str = HERE) -> list[str]:
    lines: list[str] = []
    leave_cluster(head, [address], timeout_s, lines.append)  # type: ignore[arg-type]
    return lines


def test_it_drains_its_own_node_and_waits_until_that_has_left(clock: FakeClock) -> None:
    head = FakeHead(clock)
    assert leave(head) == ["draining this node; its workers finish their requests"]
    assert set(head.drained) == {"aa"}
    assert "aa" not in head.nodes().others


def test_a_node_that_does_not_leave_in_time_is_an_error(clock: FakeClock) -> None:
    with pytest.raises(DeadlineError, match="after 60 s"):
        leave(FakeHead(clock, leaves_after_s=1000.0), 60.0)


def test_a_node_stays_until_the_head_has_ended_when_the_whole_cluster_ends(clock: FakeClock) -> None:
    head = FakeHead(clock)
    head.announces_at_s, head.ends_at_s = clock() + 3.0, clock() + 200.0
    assert leave(head) == ["the whole cluster ends; this node stays until its head has ended", "No Ray head answers."]
    assert head.drained == {}
    assert clock() >= head.ends_at_s


def test_the_end_of_the_whole_cluster_is_bounded(clock: FakeClock) -> None:
    head = FakeHead(clock)
    head.announces_at_s = clock()
    with pytest.raises(DeadlineError):
        leave(head, 60.0)


def test_a_head_that_has_ended_keeps_no_node_waiting(clock: FakeClock) -> None:
    head = FakeHead(clock)
    head.ends_at_s = begun_s = clock()
    assert leave(head) == ["No Ray head answers."]
    assert clock() < begun_s + 20.0


def test_a_short_silence_of_the_head_is_outlasted(clock: FakeClock) -> None:
    head, begun_s = FakeHead(clock), clock()
    head.silent = lambda now_s: 1.0 <= now_s - begun_s < 9.0
    leave(head)
    assert set(head.drained) == {"aa"}


def test_a_machine_without_a_node_is_told_so(clock: FakeClock) -> None:
    with pytest.raises(ConfigError, match=r"no node at 10\.0\.0\.9"):
        leave(FakeHead(clock), address="10.0.0.9")


def test_the_node_of_the_head_is_not_among_those_that_leave() -> None:
    assert HeadNodes("cc", {"aa": HERE}).at([HERE, "10.0.0.1"]) == {"aa"}
