"""When a process without a controller ends."""

from __future__ import annotations

import logging

import pytest

from cluster.config.config import RayConfig
from cluster.losses.orphan_watch import OrphanWatch, end_without_controller
from tests.fake_clock import FakeClock


class Controllers:
    """Whether there is a controller, as a test sets it."""

    def __init__(self) -> None:
        self.found: bool | None = True
        self.clock = FakeClock()
        self.watch = OrphanWatch(60.0, lambda: self.found, self.clock)

    def is_orphaned_after(self, seconds: float) -> bool:
        self.clock.now_s += seconds
        return self.watch.is_orphaned()


def test_a_process_ends_after_its_time_without_a_controller(caplog: pytest.LogCaptureFixture) -> None:
    controllers = Controllers()
    assert not controllers.is_orphaned_after(1000)
    controllers.found = False
    with caplog.at_level(logging.WARNING):
        assert [controllers.is_orphaned_after(seconds) for seconds in (1, 59, 1)] == [False, False, True]
    assert "ends in 60 s, unless `baton up` takes it over" in caplog.text
    assert len(caplog.records) == 1


def test_the_next_controller_ends_the_time() -> None:
    controllers = Controllers()
    for found in (False, True, False):
        controllers.found = found
        assert not controllers.is_orphaned_after(59)
    assert controllers.is_orphaned_after(60)


def test_a_process_that_cannot_ask_does_not_end() -> None:
    """Ray's own time limit decides while its control store is away."""
    controllers = Controllers()
    controllers.found = False
    assert not controllers.is_orphaned_after(1)
    controllers.found = None
    assert not controllers.is_orphaned_after(1000)


def test_processes_of_a_local_cluster_end_with_their_controller() -> None:
    end_without_controller(RayConfig())  # no Ray runs here, so a watch would fail
