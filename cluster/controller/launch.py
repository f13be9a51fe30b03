"""Starts a cluster from a configuration and stops it. Runs in the process that the user started."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from baton.core.errors import ConfigError, DeadlineError, WorkerLostError
from baton.process.ending import end_process
from baton.process.stop_signals import StopEvent
from cluster.config.config import BatonConfig
from cluster.controller.controller_actor import (
    ControllerLostError,
    as_baton_error,
    await_no_controller,
    create_controller,
    is_loss,
)
from cluster.controller.controller_watch import ControllerWatch
from cluster.controller.node_checks import refuse_unfit_nodes
from cluster.controller.ray_errors import short_reason
from cluster.controller.ray_watch import RayWatch
from cluster.controller.survivors import Survivors, end_survivors, find_survivors
from cluster.losses.ray_part_watch import Reply
from cluster.nodes.ray_connection import RayConnection, connect, log_folder

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_CONTROLLER_TRIES = 3
"""Controllers in a row that may die before they have taken over router and workers."""
_STOP_TIMEOUT_S = 30.0
"""Routers take 10 s at most, workers 15 s. `baton down` waits for a minute, also if others must be ended afterwards."""
_BEAT_TIMEOUT_S = 5.0
_RELOAD_TIMEOUT_S = 20.0
_REPORT_TIMEOUT_S = 2.0
_LOST_DURING_UPGRADE = (
    "The upgrade has failed: the controller was lost. Another one restores the old settings, as `baton status` shows. "
    "Try again when no worker has the new ones."
)


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """An upgrade that has begun: to which configuration, by which controller, and its call of that."""

    config: BatonConfig
    controller: Any
    call: Any


class Cluster:
    """A running cluster. It ends with :meth:`stop`; if Ray was started for it, also with this process.

    Args:
        report: called with lines of progress.
        connection: closed at the end; ``None`` when this process was connected to Ray before.
    """

    def __init__(self, config: BatonConfig, report: Callable[[str], None], connection: RayConnection | None) -> None:
        self.endpoint = ""
        self._config = config
        self._report = report
        self._connection = connection
        self._controller: Any = None
        self._next_reports: Any = None
        self._num_reported = 0  # of this controller's reports
        self._watch: ControllerWatch | None = None
        self._upgrade: _Upgrade | None = None
        self._settling: tuple[Any, Any] | None = None  # a controller, and its call
        self._ray = RayWatch.of_this_node(report)

    @classmethod
    def start(cls, config: BatonConfig, report: Callable[[str], None]) -> Cluster:
        """Connects to Ray or starts it, then starts router and workers, or takes over those that have no controller.

        Args:
            report: called with lines of progress.

        Raises:
            BatonError: a part cannot start; everything that has started is stopped again.
        """
        cluster = cls(config, report, connect(config, report))
        try:
            refuse_unfit_nodes(config, report)
            if folder := log_folder():
                report(f"router and workers log to {folder}")
            try:
                cluster._start_controller(StopEvent())
            except ControllerLostError as error:
                report(f"{error.message}; starting another one, which takes over what has started")
                cluster._replace_controller(StopEvent())
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def wait(self, stop: StopEvent, on_pass: Callable[[], None] = lambda: None) -> None:
        """Returns when ``stop`` is set. Replaces a controller that dies or hangs; router and workers outlive it.

        Args:
            on_pass: called several times per second.

        Raises:
            BatonError: the cluster cannot continue.
        """
        while not self._wait_for_controller(stop, on_pass):
            self._report("the controller is lost; starting another one, which takes over router and workers")
            lost_s = time.monotonic()
            self._replace_controller(stop)
            if not stop.is_set():
                self._report(f"the cluster has a controller again, after {time.monotonic() - lost_s:.1f} s")

    def reload(self, config: BatonConfig) -> None:
        """Takes over the API keys and SLO classes of ``config``, and the present content of certificate files.

        Raises:
            BatonError: they cannot be used, so that nothing has changed, or the controller does not answer.
        """
        call, give_up_at = self._controller.reload.remote(config.to_dict()), time.monotonic() + _RELOAD_TIMEOUT_S
        while not ray.wait([call], timeout=_POLL_S)[0]:
            if self._controller_hangs() or time.monotonic() >= give_up_at:
                raise DeadlineError("The controller did not answer in time.")
        try:
            ray.get(call)
        except RayError as error:
            raise as_baton_error(error) from error
        self._config = config

    def begin_upgrade(self, config: BatonConfig) -> None:
        """Begins to give the cluster another configuration; see :meth:`Controller.upgrade`.

        Raises:
            BatonError: no node fits the configuration, or the controller does not answer.
        """
        if self._watch is not None and not self._watch.is_trusted:
            raise DeadlineError("The controller does not answer, so nothing has changed. Try again when it does.")
        refuse_unfit_nodes(config, self._report)
        self._upgrade = _Upgrade(config, self._controller, self._controller.upgrade.remote(config.to_dict()))

    def upgrade_ended(self) -> bool:
        """Whether the upgrade that was begun has ended. If its controller is lost, the next one knows.

        Raises:
            BatonError: it has failed, or the controller was lost meanwhile.
        """
        upgrade = self._upgrade
        if upgrade is None:
            return True
        if not self._has_ended(upgrade.call):
            return False
        try:
            ray.get(upgrade.call)
            self._config = upgrade.config
        except RayError as error:
            if not is_loss(error):
                self._upgrade = None
                raise as_baton_error(error) from error
            if upgrade.controller is self._controller:
                return False
        self._upgrade = None
        if self._config is not upgrade.config:
            raise WorkerLostError(_LOST_DURING_UPGRADE)
        return True

    def not_ready(self) -> list[str] | None:
        """What is not ready although the cluster has had time for it, for people; ``None`` while it has time.

        Call it again until there is an answer. The time is ``ray.start_timeout_s`` from the first call on, and again
        from the start of a controller that replaces a lost one.

        Raises:
            BatonError: the controller cannot say.
        """
        if self._settling is None:
            self._settling = self._controller, self._controller.settle.remote()
        controller, call = self._settling
        if not self._has_ended(call):
            return None
        try:
            texts: list[str] = ray.get(call)
        except RayError as error:
            if not is_loss(error):
                self._settling = None
                raise as_baton_error(error) from error
            if controller is not self._controller:
                self._settling = None  # ask the new one
            return None
        self._settling = None
        return texts

    def stop(self) -> None:
        """Stops router and workers, and disconnects from Ray if this process connected to it or started it."""
        controller, self._controller = self._controller, None
        try:
            if controller is not None and (self._watch is None or self._watch.is_trusted):
                ray.get(controller.beat.remote(), timeout=_BEAT_TIMEOUT_S)  # it may hang without having been asked
                ray.get(controller.stop.remote(), timeout=_STOP_TIMEOUT_S)
        except (RayError, GetTimeoutError) as error:
            logger.warning("the controller did not stop by itself: %s", short_reason(error))
        finally:
            if controller is not None:
                ray.kill(controller, no_restart=True)
                if self._ray.ask_gcs() is Reply.ANSWERS:
                    end_survivors(self._config.ray.namespace)
            self._ray.close()
            if self._connection is not None:
                self._connection.close()

    def _replace_controller(self, stop: StopEvent) -> None:
        """Starts another controller, and the next one if that is lost before it has taken over."""
        while self._ray_is_in_doubt() and not stop.wait(_POLL_S):
            pass
        if stop.is_set():
            return
        for _ in range(_CONTROLLER_TRIES - 1):
            try:
                self._start_controller(stop)
                return
            except ControllerLostError as error:
                if self._ray.ask_gcs() is Reply.REFUSES:
                    raise
                self._report(f"the new controller is lost, too; starting the next one: {error.message}")
        self._start_controller(stop)

    def _start_controller(self, stop: StopEvent) -> None:
        if not await_no_controller(self._config.ray.namespace, stop, self._ray_is_in_doubt):
            return
        controller = self._controller = create_controller(self._config, self._find_survivors())
        self._watch = ControllerWatch(self._config.liveness, lambda: controller.beat.remote().future(), self._report)
        self._next_reports, self._num_reported = controller.next_reports.remote(), 0
        self.endpoint = self._wait_for_start(stop) or self.endpoint

    def _find_survivors(self) -> Survivors | None:
        """What can be taken over. If routers have the configuration of an upgrade, all workers have it as well."""
        try:
            return find_survivors(self._config)
        except ConfigError:
            if self._upgrade is None:
                raise
            survivors = find_survivors(self._upgrade.config)
            self._config = self._upgrade.config
            return survivors

    def _wait_for_start(self, stop: StopEvent) -> str | None:
        """Returns the endpoint once router and workers have started, and ``None`` if ``stop`` is set before."""
        started = self._controller.start.remote()
        while not stop.is_set():
            done, _ = ray.wait([started, self._next_reports], num_returns=1, timeout=_POLL_S)
            try:
                self._pass_on_reports(done)
                if started in done:
                    return str(ray.get(started))
            except RayError as error:
                raise as_baton_error(error) from error
            if self._controller_hangs():
                raise ControllerLostError("The cluster's controller hangs.")
        return None

    def _pass_on_reports(self, done: list[Any]) -> None:
        if self._next_reports in done:
            lines: list[str] = ray.get(self._next_reports)
            for line in lines:
                self._report(line)
            self._num_reported += len(lines)
            self._next_reports = self._controller.next_reports.remote()

    def _has_ended(self, call: Any) -> bool:
        """Whether a call of the controller has ended. Then all that it reported before has been passed on."""
        if not ray.wait([call], timeout=0)[0]:
            return False
        with suppress(RayError):  # a controller that is lost or hangs reports nothing more
            num_reports: int = ray.get(self._controller.num_reports.remote(), timeout=_REPORT_TIMEOUT_S)
            while self._num_reported < num_reports and (
                done := ray.wait([self._next_reports], timeout=_REPORT_TIMEOUT_S)[0]
            ):
                self._pass_on_reports(done)
        return True

    def _controller_hangs(self) -> bool:
        """Whether the controller must be replaced since it does not answer; then it is ended.

        Raises:
            WorkerLostError: Ray does not answer, and the cluster must end.
        """
        if self._ray_is_in_doubt() or self._watch is None or not self._watch.look():
            return False
        end_process(self._watch.pid)  # Ray alone takes about five seconds for a stopped process
        ray.kill(self._controller, no_restart=True)
        return True

    def _ray_is_in_doubt(self) -> bool:
        """Whether a part of Ray does not answer. Raises :class:`WorkerLostError` if the cluster must end for that."""
        self._ray.look()
        return self._ray.is_in_doubt

    def _why_ray_has_ended(self) -> str:
        if self._config.ray.is_local:
            return "The local Ray has ended, and router and workers with it. Run `baton up` again."
        return (
            f"Ray's head at {self._ray.gcs} has ended, and router and controller with it. Start it again, then "
            "`baton up`; docs/failures.md says which workers may be left."
        )

    def _wait_for_controller(self, stop: StopEvent, on_pass: Callable[[], None]) -> bool:
        """Passes on its reports. Returns True when ``stop`` is set, and False when it should be replaced."""
        alive = self._controller.wait.remote()
        while not stop.wait(_POLL_S):
            on_pass()
            done, _ = ray.wait([alive, self._next_reports], num_returns=2, timeout=0)
            try:
                self._pass_on_reports(done)
                if alive in done:
                    ray.get(alive)
                    return True
            except RayError as error:
                if not is_loss(error):
                    raise as_baton_error(error) from error
                if self._ray.ask_gcs() is Reply.REFUSES:
                    raise WorkerLostError(self._why_ray_has_ended()) from error
                return False
            if self._controller_hangs():
                return False
        return True


def end_without_controller(config: BatonConfig, report: Callable[[str], None]) -> int:
    """Ends router and workers that have lost their controller; returns how many processes there were.

    Raises:
        ConfigError: they have a controller, or Ray cannot be reached.
    """
    connection = connect(config, report)
    try:
        await_no_controller(config.ray.namespace, StopEvent())
        return end_survivors(config.ray.namespace)
    finally:
        if connection is not None:
            connection.close()
