"""A new controller waits for the end of the last one, whatever Ray knows of that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from baton.core.errors import ConfigError
from baton.process.stop_signals import StopEvent
from cluster.controller import controller_actor
from cluster.controller.controller_actor import await_no_controller

ALIVE = "alive"
UNKNOWN = ActorUnavailableError("unavailable", None)


class NamedActors:
    """Stands in for the module ``ray``, which says one thing after another of the actor with the controller's name.

    Each takes 0.2 s on the clock of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, said: list[Any]) -> None:
        self.said = said
        self.num_said = 0
        self.killed: list[Any] = []
        monkeypatch.setattr(controller_actor, "ray", self)
        monkeypatch.setattr(controller_actor, "_POLL_S", 0.0)
        monkeypatch.setattr(controller_actor, "time", SimpleNamespace(monotonic=lambda: 0.2 * self.num_said))

    def get_actor(self, name: str, namespace: str) -> Any:
        if not self.said:
            raise ValueError(name)
        self.num_said += 1
        said = self.said.pop(0)
        return SimpleNamespace(said=said, pool_status=SimpleNamespace(remote=lambda: said))

    def get(self, said: Any, timeout: float) -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        self.killed.append(actor.said)


def test_a_controller_that_ray_only_believes_alive_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = ActorDiedError()
    actors = NamedActors(monkeypatch, [dead])
    assert await_no_controller("baton", StopEvent())
    assert actors.killed == [dead]


@pytest.mark.parametrize(("said", "after"), [(ALIVE, 5.0), (UNKNOWN, 20.0)])
def test_a_controller_that_lives_is_left_alone(monkeypatch: pytest.MonkeyPatch, said: Any, after: float) -> None:
    actors = NamedActors(monkeypatch, [said] * 200)
    with pytest.raises(ConfigError, match="already runs in the Ray namespace 'baton'"):
        await_no_controller("baton", StopEvent())
    assert actors.num_said == after / 0.2
    assert actors.killed == []


def test_a_loss_that_a_hanging_ray_has_not_noticed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The raylet reports it when it answers again."""
    actors = NamedActors(monkeypatch, [UNKNOWN] * 300)
    assert await_no_controller("baton", StopEvent(), lambda: 5 < actors.num_said < 250)
    assert actors.said == []


def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopEvent()
    stop.set()
    NamedActors(monkeypatch, [UNKNOWN])
    assert not await_no_controller("baton", stop)
