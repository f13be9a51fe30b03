"""What `baton up` says of a controller that does not answer, and when it replaces it."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from cluster.controller.controller_watch import ControllerWatch
from cluster.registry.liveness_config import LivenessConfig

PASS_S = 0.25


class Watched:
    """A watch with a clock and a controller of the test.

    Attributes:
        answers: whether the controller answers what it is asked from now on.
    """

    def __init__(self) -> None:
        self.now_s = 100.0
        self.answers = True
        self.reports: list[str] = []
        self._open: list[Future[int]] = []
        self.watch = ControllerWatch(
            LivenessConfig(),
            self._ask,
            self.reports.append,
            clock=lambda: self.now_s,
        )

    def _ask(self) -> Future[int]:
        call: Future[int] = Future()
        self._open.append(call)
        return call

    def run(self, seconds: float) -> float | None:
        """Looks regularly; returns the seconds after which the controller was to be replaced."""
        for number in range(1, int(seconds / PASS_S) + 1):
            self.now_s += PASS_S
            while self.answers and self._open:
                self._open.pop().set_result(7)
            if self.watch.look():
                return number * PASS_S
        return None


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_controller_that_answers_is_trusted(watched: Watched) -> None:
    assert watched.run(60.0) is None
    assert watched.watch.is_trusted
    assert watched.reports == []


def test_silence_before_the_first_answer_is_its_start(watched: Watched) -> None:
    watched.answers = False
    assert watched.run(60.0) is None
    assert watched.reports == []


def test_a_silent_controller_is_named_and_replaced(watched: Watched) -> None:
    watched.run(5.0)
    watched.answers = False
    assert watched.run(60.0) == pytest.approx(3.0 + 10.0, abs=3 * PASS_S)
    [suspicion, verdict] = watched.reports
    assert suspicion.startswith(
        "the controller may hang: it has not answered for 3.0 s. No router or worker is replaced"
    )
    assert "it is replaced after 10 s more" in suspicion
    assert watched.watch.pid == 7
    assert verdict.startswith("the controller hangs: it has not answered for 1")


def test_a_controller_that_answers_again_is_trusted_again(watched: Watched) -> None:
    watched.run(5.0)
    watched.answers = False
    watched.run(6.0)
    watched.answers = True
    assert watched.run(30.0) is None
    assert watched.watch.is_trusted
    assert watched.reports[1:] == ["the controller answers again"]


def test_a_delay_of_the_caller_does_not_count(watched: Watched) -> None:
    watched.run(5.0)
    watched.answers = False
    watched.now_s += 3600.0  # the machine slept
    assert not watched.watch.look()
    assert watched.watch.is_trusted
