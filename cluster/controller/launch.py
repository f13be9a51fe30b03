"""Starts a cluster from a configuration and stops it. Runs in the process that the user started."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.core.errors import BatonError, ConfigError, DeadlineError, WorkerLostError
from baton.process.stop_signals import StopEvent, signals_deferred
from baton.process.worker_environment import LOCAL_RAY_VARIABLES, worker_variables
from cluster.config.config import BatonConfig
from cluster.controller.controller import ACTOR_NAME, Controller

_OBJECT_STORE_BYTES = 128 * 2**20
_POLL_S = 0.2
_STOP_TIMEOUT_S = 45.0
_CONNECT_TIMEOUT_S = 5.0
_RELOAD_TIMEOUT_S = 20.0


class Cluster:
    """A running cluster. It ends with :meth:`stop`, or with this process."""

    def __init__(self, controller: Any, endpoint: str, *, owns_ray: bool) -> None:
        self.endpoint = endpoint
        self._controller = controller
        self._owns_ray = owns_ray

    @classmethod
    def start(cls, config: BatonConfig, report: Callable[[str], None]) -> Cluster:
        """Connects to Ray or starts it, then starts router and workers.

        Args:
            report: called with lines of progress.

        Raises:
            BatonError: a part cannot start; everything that has started is stopped again.
        """
        owns_ray = connect(config, report)
        controller: Any = None
        try:
            controller = _create_controller(config)
            if folder := _log_folder():
                report(f"router and workers log to {folder}")
            endpoint = _wait_for_start(controller, report)
        except BaseException:
            cls(controller, "", owns_ray=owns_ray).stop()
            raise
        return cls(controller, endpoint, owns_ray=owns_ray)

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
            if self._owns_ray:
                ray.shutdown()


def connect(config: BatonConfig, report: Callable[[str], None]) -> bool:
    """Connects to Ray or starts it, unless this process is connected already.

    Returns:
        Whether the caller must shut Ray down.

    Raises:
        ConfigError: Ray cannot be reached or started.
    """
    if ray.is_initialized():
        return False
    # Dashboard, usage statistics and log forwarding are unused here, and cost start-up time and idle CPU.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": config.ray.namespace, "logging_level": "error", "log_to_driver": False}
    address = config.ray.address
    if address is None:
        report("starting a local Ray cluster")
        for name, value in (LOCAL_RAY_VARIABLES | worker_variables()).items():
            os.environ.setdefault(name, value)
        options |= {
            "address": "local",  # without it, ray connects to the last cluster that was started on this machine
            "num_cpus": config.ray.local_cpus,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    else:
        report(f"connecting to the Ray cluster at {address}")
        options["address"] = address
    try:
        if address not in (None, "auto"):
            _knock(address)
        with signals_deferred():
            ray.init(**options)
    except KeyboardInterrupt:
        ray.shutdown()
        raise
    except Exception as error:  # Ray raises Exception itself when a node takes too long
        if address is None:
            raise ConfigError(
                f"A local Ray cluster could not be started: {error}. If the machine is busy, try again "
                "later, or set ray.address to a running Ray cluster."
            ) from error
        raise ConfigError(
            f"Ray cannot be reached at ray.address {address}: {error}. "
            "Start it with `ray start --head`, or set ray.address to null for a local cluster."
        ) from error
    return True


def _knock(address: str) -> None:
    """Raises OSError when ``host:port`` refuses connections, which Ray takes minutes to detect."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


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
        return actor_class.remote(config.to_dict())
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
