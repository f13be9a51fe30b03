"""What the process of `baton up` does: Ray's start, its errors, and controllers that die."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from baton.core.errors import ConfigError, DeadlineError, WorkerLostError
from baton.process.stop_signals import StopEvent
from cluster.config.config import BatonConfig
from cluster.controller import controller_actor, launch
from cluster.controller.launch import Cluster
from cluster.losses.ray_part_watch import Reply


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
        self.named: list[Actor] = []  # whom the name of the controller finds

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
class FakeRayWatch:
    """Stands in for :class:`cluster.controller.ray_watch.RayWatch`."""

    gcs: str = "head:6379"
    is_in_doubt: bool = False
    reply: Reply = Reply.ANSWERS
    end: WorkerLostError | None = None

    def look(self) -> None:
        if self.end is not None:
            raise self.end

    def ask_gcs(self) -> Reply:
        return self.reply

    def close(self) -> None: ...


@dataclass
class Launched:
    """A cluster whose controllers are those of a test."""

    fake: SynchronousRay
    controllers: list[Actor]
    reports: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    ray_watch: FakeRayWatch = field(default_factory=FakeRayWatch)

    def start(self, address: str | None) -> Cluster:
        return Cluster.start(BatonConfig.from_dict({"ray": {"address": address}}), self.reports.append)


STARTED = Reference("http://here:8000")
DEAD = Reference(ActorDiedError())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    found = Launched(SynchronousRay(), [])
    monkeypatch.setattr(launch, "ray", found.fake)
    monkeypatch.setattr(controller_actor, "ray", found.fake)
    monkeypatch.setattr(launch, "_POLL_S", 0.001)
    monkeypatch.setattr(controller_actor, "_POLL_S", 0.001)
    monkeypatch.setattr(launch, "end_process", found.ended.append)
    monkeypatch.setattr(launch, "log_folder", lambda: None)
    for name in ("connect", "refuse_unfit_nodes", "find_survivors"):
        monkeypatch.setattr(launch, name, lambda *_: None)
    monkeypatch.setattr(launch, "end_survivors", found.swept.append)
    monkeypatch.setattr(launch, "create_controller", lambda *_: found.controllers.pop(0))
    monkeypatch.setattr(launch.RayWatch, "of_this_node", lambda _: found.ray_watch)
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


def test_a_controller_is_not_blamed_while_ray_is_in_doubt(launched: Launched) -> None:
    """It may wait for Ray in a call that blocks it."""
    stop, answer, passes = StopEvent(), Reference(123), itertools.count()
    launched.controllers = [Actor(start=STARTED, beat=answer)]
    config = BatonConfig.from_dict({"liveness": {"suspect_after": 0.05, "replace_after": 0.01}})
    cluster = Cluster.start(config, launched.reports.append)

    def on_pass() -> None:
        if (number := next(passes)) == 5:
            launched.ray_watch.is_in_doubt, answer.result = True, None
        if number == 100:
            stop.set()

    cluster.wait(stop, on_pass)
    assert launched.reports == []


def test_a_lost_controller_is_replaced_when_ray_answers(launched: Launched) -> None:
    launched.controllers = [Actor(start=STARTED, wait=DEAD), Actor(start=STARTED)]
    cluster, stop = launched.start("head:6379"), StopEvent()
    launched.ray_watch.is_in_doubt = True
    asked = threading.Timer(0.05, stop.set)
    asked.start()
    cluster.wait(stop)
    assert len(launched.controllers) == 1, "it has waited until it was stopped"
    assert "has a controller again" not in " ".join(launched.reports)
    launched.ray_watch.end = WorkerLostError("Ray's raylet has not answered for 45 s")
    with pytest.raises(WorkerLostError, match="raylet has not answered"):
        cluster.wait(StopEvent())


def test_a_reload_does_not_hide_a_controller_that_hangs(launched: Launched) -> None:
    answer = Reference(123)
    controller = Actor(start=STARTED, beat=answer)
    launched.controllers = [controller]
    config = BatonConfig.from_dict({"liveness": {"suspect_after": 0.05, "replace_after": 0.05}})
    cluster = Cluster.start(config, launched.reports.append)
    for _ in range(5):
        assert not cluster._controller_hangs()
    answer.result = None
    with pytest.raises(DeadlineError, match="did not answer in time"):
        cluster.reload(config)
    assert launched.fake.killed == [controller]
    assert any("the controller may hang" in text for text in launched.reports)


def test_a_controller_that_does_not_answer_is_not_asked_to_stop(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []

    def get(reference: Reference, timeout: float | None = None) -> None:
        asked.append(timeout)
        raise GetTimeoutError

    controller = Actor(start=STARTED)
    launched.controllers = [controller]
    cluster = launched.start("head:6379")
    monkeypatch.setattr(launched.fake, "get", get)
    cluster.stop()
    assert asked == [launch._BEAT_TIMEOUT_S], "to stop takes much longer"
    assert launched.fake.killed == [controller]
    assert launched.swept == ["baton"]


def test_a_stop_ends_the_start_of_another_controller(launched: Launched) -> None:
    stop = StopEvent()
    launched.controllers = [Actor(start=STARTED, wait=DEAD), Actor(next_reports=Reference(["taking over"]))]
    cluster = launched.start("head:6379")
    cluster._report = lambda line: stop.set() if line == "taking over" else None
    cluster.wait(stop)
    assert stop.is_set()


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
    cluster._start_controller(StopEvent())
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
    cluster._start_controller(StopEvent())
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
    launched.ray_watch.reply = Reply.REFUSES
    with pytest.raises(WorkerLostError, match=text):
        cluster.wait(StopEvent())
    cluster.stop()
    assert launched.swept == []  # which would wait for the head


def test_a_cluster_that_cannot_start_leaves_others_alone(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_actor, "_LAST_CONTROLLER_S", 0.01)
    launched.fake.named = [Actor(pool_status=Reference({}))] * 100
    with pytest.raises(ConfigError, match="already runs in the Ray namespace 'baton'"):
        launched.start("head:6379")
    assert (launched.fake.killed, launched.swept) == ([], [])


def test_a_controller_lost_in_the_start_is_replaced(launched: Launched) -> None:
    launched.controllers = [Actor(start=DEAD), Actor(start=STARTED)]
    assert launched.start(None).endpoint == "http://here:8000"
    assert "its process died; starting another one, which takes over what has started" in launched.reports[0]
    raised = ActorDiedError(RayTaskError("__init__", "", RuntimeError("no such model")))
    launched.controllers = [Actor(start=Reference(raised)), Actor(start=STARTED)]
    with pytest.raises(WorkerLostError, match=r"creation task|no such model"):
        launched.start(None)


def test_what_is_not_ready_is_asked_of_the_next_controller_if_the_first_is_lost(launched: Launched) -> None:
    dead, alive = Actor(start=STARTED, settle=DEAD), Actor(start=STARTED, settle=Reference(["decode-2 is starting"]))
    launched.controllers = [dead, alive]
    cluster = launched.start("head:6379")
    assert cluster.not_ready() is None
    assert cluster.not_ready() is None, "the loss is noticed elsewhere"
    cluster._start_controller(StopEvent())
    assert [cluster.not_ready(), cluster.not_ready()] == [None, ["decode-2 is starting"]]
