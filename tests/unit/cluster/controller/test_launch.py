"""What the process of `baton up` does: Ray's start, its errors, and controllers that die."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from baton.core.errors import ConfigError, DeadlineError, WorkerLostError
from baton.process.stop_signals import StopEvent
from baton.process.worker_environment import worker_variables
from cluster.config.config import BatonConfig
from cluster.controller import launch
from cluster.controller.launch import Cluster
from cluster.nodes.ray_connection import connect


@pytest.mark.parametrize("raised", [Exception("The current node timed out during startup."), OSError("no space")])
def test_a_local_ray_that_does_not_start_gives_one_message(raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises the class Exception itself when a machine is so busy that its node is late."""

    def init(**options: object) -> None:
        raise raised

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"local Ray cluster could not be started: .*try again later"):
        Cluster.start(BatonConfig.from_dict({"router": {"port": 0}}), lambda line: None)


def test_a_local_ray_has_the_environment_of_workers_and_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors that need no other one need not wait until Ray has made it."""
    seen: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", {"RAY_worker_niceness": "3", "HOME": str(tmp_path), "RAY_REDIS_ADDRESS": "a:1"})
    monkeypatch.setattr(ray, "init", lambda **options: seen.update(os.environ))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert connect(BatonConfig(), lambda line: None) is not None
    assert seen.items() >= worker_variables().items()
    assert seen["RAY_prestart_worker_first_driver"] == "0"
    assert seen["RAY_worker_niceness"] == "3"
    assert seen["RAY_COLOR_PREFIX"] == "0"
    assert "RAY_REDIS_ADDRESS" not in seen


class Reference:
    """The result of a call of an actor; ``None`` while there is none."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def future(self) -> Future[Any]:
        """As for :class:`ray.ObjectRef`."""
        found: Future[Any] = Future()
        if isinstance(self.result, Exception):
            found.set_exception(self.result)
        elif self.result is not None:
            found.set_result(self.result)
        return found


class Actor:
    """A controller: its calls return the references of a test, or ones without a result."""

    def __init__(self, **references: Reference) -> None:
        self._references = {"num_reports": Reference(0), **references}

    def __getattr__(self, name: str) -> Any:
        found = self._references.get(name) or Reference()
        return SimpleNamespace(remote=lambda *_: found)


class SynchronousRay:
    """Stands in for the module ``ray`` in the process of `baton up`."""

    def __init__(self) -> None:
        self.killed: list[Actor] = []
        self.named: list[Actor] = []
        """Whom the name of the controller finds, one lookup after another."""

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="head:6379")

    def wait(self, references: list[Reference], num_returns: int = 1, timeout: float | None = None) -> Any:
        return [each for each in references if each.result is not None], []

    def get(self, reference: Reference, timeout: float | None = None) -> Any:
        if isinstance(reference.result, Exception):
            raise reference.result
        return reference.result

    def get_actor(self, name: str, namespace: str) -> Actor:
        if not self.named:
            raise ValueError(name)
        return self.named.pop(0)

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        self.killed.append(actor)


@dataclass
class Launched:
    """A cluster whose controllers are those of a test."""

    fake: SynchronousRay
    controllers: list[Actor]
    reports: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    gcs_lives: bool = True

    def start(self, address: str | None) -> Cluster:
        return Cluster.start(BatonConfig.from_dict({"ray": {"address": address}}), self.reports.append)


STARTED = Reference("http://here:8000")
DEAD = Reference(ActorDiedError())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    found = Launched(SynchronousRay(), [])
    monkeypatch.setattr(launch, "ray", found.fake)
    monkeypatch.setattr(launch, "_POLL_S", 0.001)
    monkeypatch.setattr(launch, "end_process", found.ended.append)
    monkeypatch.setattr(launch, "_log_folder", lambda: None)
    for name in ("connect", "refuse_unfit_nodes", "find_survivors"):
        monkeypatch.setattr(launch, name, lambda *_: None)
    monkeypatch.setattr(launch, "end_survivors", found.swept.append)
    monkeypatch.setattr(launch, "_create_controller", lambda *_: found.controllers.pop(0))
    monkeypatch.setattr(Cluster, "_gcs_lives", lambda _: found.gcs_lives)
    return found


@pytest.mark.parametrize("address", [None, "head:6379"])
def test_a_dead_controller_is_replaced(launched: Launched, address: str | None) -> None:
    stop = StopEvent()
    first, second = Actor(start=STARTED, wait=DEAD), Actor(start=STARTED, next_reports=Reference(["decode-2 is ready"]))
    launched.controllers = [first, second]
    cluster = launched.start(address)
    cluster.wait(stop, lambda: stop.set() if "decode-2 is ready" in launched.reports else None)
    told = " ".join(launched.reports)
    assert "the controller is lost; starting another one, which takes over router and workers" in told
    assert "the cluster has a controller again" in told
    cluster.stop()
    assert launched.fake.killed == [second]
    assert launched.swept == ["baton"]


def test_a_controller_that_dies_while_it_takes_over_is_replaced_a_few_times(launched: Launched) -> None:
    stop = StopEvent()
    last = Actor(start=STARTED, next_reports=Reference(["decode-2 is ready"]))
    launched.controllers = [Actor(start=STARTED, wait=DEAD), Actor(start=DEAD), last]
    cluster = launched.start("head:6379")
    cluster.wait(stop, lambda: stop.set() if "decode-2 is ready" in launched.reports else None)
    assert "the new controller is lost, too; starting the next one" in " ".join(launched.reports)
    launched.controllers = [Actor(start=STARTED, wait=DEAD), *(Actor(start=DEAD) for _ in range(3)), last]
    with pytest.raises(WorkerLostError, match="controller failed: its process died"):
        launched.start("head:6379").wait(StopEvent())
    assert launched.controllers == [last], "a controller that always dies ends the cluster"


def test_a_controller_that_hangs_is_ended_and_replaced(launched: Launched) -> None:
    stop, answer, passes = StopEvent(), Reference(123), itertools.count()
    first = Actor(start=STARTED, beat=answer)
    second = Actor(start=STARTED, next_reports=Reference(["decode-2 is ready"]), beat=Reference(123))
    launched.controllers = [first, second]
    times = {"suspect_after": 0.05, "replace_after": 0.05}
    config = BatonConfig.from_dict({"ray": {"address": "head:6379"}, "liveness": times})
    cluster = Cluster.start(config, launched.reports.append)

    def on_pass() -> None:
        answer.result = 123 if next(passes) < 5 else None
        if "decode-2 is ready" in launched.reports:
            stop.set()

    cluster.wait(stop, on_pass)
    assert launched.fake.killed == [first]
    assert launched.ended == [123]
    told = " ".join(launched.reports)
    assert "the controller hangs: it has not answered for" in told
    assert "the cluster has a controller again" in told


def test_an_upgrade_is_refused_while_the_controller_is_silent(launched: Launched) -> None:
    stop, answer, passes = StopEvent(), Reference(123), itertools.count()
    launched.controllers = [Actor(start=STARTED, beat=answer)]
    config = BatonConfig.from_dict({"liveness": {"suspect_after": 0.05}})
    cluster = Cluster.start(config, launched.reports.append)

    def on_pass() -> None:
        answer.result = 123 if next(passes) < 5 else None
        if any("may hang" in text for text in launched.reports):
            stop.set()

    cluster.wait(stop, on_pass)
    with pytest.raises(DeadlineError, match="does not answer, so nothing has changed"):
        cluster.begin_upgrade(BatonConfig())


def test_an_upgrade_ends_with_the_loss_of_its_controller(launched: Launched) -> None:
    launched.controllers = [Actor(start=STARTED, upgrade=DEAD, wait=DEAD), Actor(start=STARTED)]
    cluster = launched.start("head:6379")
    cluster.begin_upgrade(BatonConfig())
    assert not cluster.upgrade_ended(), "only the next controller knows"
    cluster._start_controller()
    with pytest.raises(WorkerLostError, match=r"controller was lost\. Another one restores the old"):
        cluster.upgrade_ended()
    assert cluster.upgrade_ended()


@pytest.mark.parametrize("ended", [Reference(True), Reference(ConfigError("no worker starts"))], ids=["well", "badly"])
def test_what_an_upgrade_reports_comes_before_its_outcome(launched: Launched, ended: Reference) -> None:
    """The controller has reported two lines, of which the second one is on its way."""
    news = Reference(["decode-2 is ready"])
    launched.controllers = [
        Actor(start=STARTED, upgrade=ended, settle=Reference([]), num_reports=Reference(2), next_reports=news)
    ]
    stop = StopEvent()
    cluster = launched.start(None)
    cluster.begin_upgrade(BatonConfig())

    def on_pass() -> None:
        try:
            if cluster.upgrade_ended() and cluster.not_ready() is not None:
                launched.reports.append("the outcome")
        except ConfigError as error:
            launched.reports.append(error.message)
        if len(launched.reports) >= 3:
            stop.set()

    cluster.wait(stop, on_pass)
    assert launched.reports[:2] == ["decode-2 is ready"] * 2
    assert launched.reports[2] in ("the outcome", "no worker starts")


def test_an_upgrade_that_fails_with_a_lost_router_has_not_lost_its_controller(launched: Launched) -> None:
    failure = RayTaskError("upgrade", "", ActorDiedError()).as_instanceof_cause()
    assert isinstance(failure, ActorDiedError)
    launched.controllers = [Actor(start=STARTED, upgrade=Reference(failure))]
    cluster = launched.start("head:6379")
    cluster.begin_upgrade(BatonConfig())
    with pytest.raises(WorkerLostError, match="controller failed"):
        cluster.upgrade_ended()


def test_a_controller_that_fails_with_a_lost_router_is_not_replaced(launched: Launched) -> None:
    failure = RayTaskError("wait", "", ActorDiedError()).as_instanceof_cause()
    launched.controllers = [Actor(start=STARTED, wait=Reference(failure))]
    with pytest.raises(WorkerLostError, match="controller failed"):
        launched.start("head:6379").wait(StopEvent())


def test_an_upgrade_that_routers_have_taken_over_survives_its_controller(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller dies after the routers have the new configuration, and before this process knows of it."""
    new, tried = BatonConfig.from_dict({"decode": {"kv_blocks": 64}, "ray": {"address": "head:6379"}}), []

    def find(config: BatonConfig) -> None:
        tried.append(config)
        if len(tried) > 1 and config is not new:
            raise ConfigError("with another configuration: decode.kv_blocks")

    monkeypatch.setattr(launch, "find_survivors", find)
    launched.controllers = [Actor(start=STARTED, upgrade=DEAD), Actor(start=STARTED)]
    cluster = launched.start("head:6379")
    cluster.begin_upgrade(new)
    cluster._start_controller()
    assert cluster.upgrade_ended()
    assert tried[-1] is cluster._config is new


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("head:6379", "Ray's head at head:6379 has ended, and router and controller with it"),
        (None, r"The local Ray has ended, and router and workers with it\. Run `baton up` again"),
    ],
)
def test_the_end_of_rays_head_is_named(launched: Launched, address: str | None, text: str) -> None:
    launched.controllers = [Actor(start=STARTED, wait=DEAD)]
    cluster = launched.start(address)
    launched.gcs_lives = False
    with pytest.raises(WorkerLostError, match=text):
        cluster.wait(StopEvent())
    cluster.stop()
    assert launched.swept == []  # which would wait for the head


def test_a_cluster_that_cannot_start_leaves_other_clusters_alone(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_LAST_CONTROLLER_S", 0.01)
    launched.fake.named = [Actor(pool_status=Reference({}))] * 100
    with pytest.raises(ConfigError, match="already runs in the Ray namespace 'baton'"):
        launched.start("head:6379")
    assert (launched.fake.killed, launched.swept) == ([], [])


def test_a_controller_that_ray_only_believes_alive_is_forgotten(launched: Launched) -> None:
    dead = Actor(pool_status=DEAD)
    launched.fake.named = [dead]
    launched.controllers = [Actor(start=STARTED)]
    assert launched.start("head:6379").endpoint == "http://here:8000"
    assert launched.fake.killed == [dead]


def test_what_is_not_ready_is_asked_of_the_next_controller_if_the_first_is_lost(launched: Launched) -> None:
    dead, alive = Actor(start=STARTED, settle=DEAD), Actor(start=STARTED, settle=Reference(["decode-2 is starting"]))
    launched.controllers = [dead, alive]
    cluster = launched.start("head:6379")
    assert cluster.not_ready() is None
    assert cluster.not_ready() is None, "the loss is noticed elsewhere"
    cluster._start_controller()
    assert [cluster.not_ready(), cluster.not_ready()] == [None, ["decode-2 is starting"]]
