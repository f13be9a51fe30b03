"""Starts a cluster from a configuration and stops it. Runs in the process that the user started."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.core.errors import BatonError, ConfigError, DeadlineError, WorkerLostError
from baton.process.stop_signals import StopEvent
from baton.process.worker_environment import carried_variables
from cluster.config.config import BatonConfig
from cluster.controller.controller import ACTOR_NAME, Controller
from cluster.controller.node_checks import refuse_unfit_nodes
from cluster.nodes.ray_connection import RayConnection, connect

_POLL_S = 0.2
_STOP_TIMEOUT_S = 45.0
_RELOAD_TIMEOUT_S = 20.0


class Cluster:
    """A running cluster. It ends with :meth:`stop`, or with this process.

    Args:
        connection: closed at the end; ``None`` when this process was connected to Ray before.
    """

    def __init__(self, controller: Any, endpoint: str, connection: RayConnection | None) -> None:
        self.endpoint = endpoint
        self._controller = controller
        self._connection = connection

    @classmethod
    def start(cls, config: BatonConfig, report: Callable[[str], None]) -> Cluster:
        """Connects to Ray or starts it, then starts router and workers.

        Args:
            report: called with lines of progress.

        Raises:
            BatonError: a part cannot start; everything that has started is stopped again.
        """
        connection = connect(config, report)
        controller: Any = None
        try:
            refuse_unfit_nodes(config, report)
            controller = _create_controller(config)
            if folder := _log_folder():
                report(f"router and workers log to {folder}")
            endpoint = _wait_for_start(controller, report)
        except BaseException:
            cls(controller, "", connection).stop()
            raise
        return cls(controller, endpoint, connection)

    def wait(self, stop: StopEvent, on_pass: Callable[[], None] = lambda: None) -> None:
        """Returns when ``stop`` is set.

        Args:
            on_pass: called several times per second.

        Raises:
            BatonError: the cluster cannot continue.
        """
        alive = self._controller.wait.remote()
        while not stop.wait(_POLL_S):
            on_pass()
            done, _ = ray.wait([alive], timeout=0)
            if done:
                try:
                    ray.get(alive)
                except RayError as error:
                    raise _as_baton_error(error) from error
                return

    def reload(self, config: BatonConfig) -> None:
        """Takes over the API keys and SLO classes of ``config``, and the present content of certificate files.

        Raises:
            BatonError: they cannot be used, so that nothing has changed, or the controller does not answer.
        """
        try:
            ray.get(self._controller.reload.remote(config.to_dict()), timeout=_RELOAD_TIMEOUT_S)
        except GetTimeoutError as error:
            raise DeadlineError("The controller did not answer in time.") from error
        except RayError as error:
            raise _as_baton_error(error) from error

    def stop(self) -> None:
        """Stops router and workers, and disconnects from Ray if this process connected to it or started it."""
        try:
            if self._controller is not None:
                ray.get(self._controller.stop.remote(), timeout=_STOP_TIMEOUT_S)
        except (RayError, GetTimeoutError) as error:
            logging.getLogger(__name__).warning("the controller did not stop by itself: %s", error)
        finally:
            if self._controller is not None:
                ray.kill(self._controller, no_restart=True)
            self._controller = None
            if self._connection is not None:
                self._connection.close()


def _create_controller(config: BatonConfig) -> Any:
    # On this node, where the user expects the endpoint; Ray may place an actor that needs no CPU on any node.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(Controller).options(
        name=ACTOR_NAME,
        namespace=config.ray.namespace,
        num_cpus=0,
        max_concurrency=1000,
        scheduling_strategy=here,
    )
    try:
        return actor_class.remote(config.to_dict(), variables=carried_variables())
    except ValueError as error:
        raise ConfigError(
            f"A baton cluster already runs in the Ray namespace {config.ray.namespace!r}. "
            "Stop it with `baton down`, or choose another ray.namespace."
        ) from error


def _wait_for_start(controller: Any, report: Callable[[str], None]) -> str:
    started = controller.start.remote()
    line = controller.next_report.remote()
    while True:
        done, _ = ray.wait([started, line], num_returns=1)
        try:
            if line in done:
                report(ray.get(line))
                line = controller.next_report.remote()
            if started in done:
                return str(ray.get(started))
        except RayError as error:
            raise _as_baton_error(error) from error


def _log_folder() -> str | None:
    """The folder with the output of this node's processes, or ``None`` when Ray does not say."""
    node = ray._private.worker._global_node  # Ray has no public API for this
    return str(node.get_logs_dir_path()) if node is not None else None


def _as_baton_error(error: RayError) -> BatonError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, BatonError):
        return cause
    return WorkerLostError(f"The cluster's controller failed: {error}")
