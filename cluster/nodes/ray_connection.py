"""Connects this process to a Ray cluster, or starts a local one."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from baton.core.errors import BatonError, ConfigError
from baton.process.ending import end_process
from baton.process.stop_signals import signals_deferred
from baton.process.worker_environment import LOCAL_RAY_VARIABLES, worker_variables
from cluster.config.config import BatonConfig
from cluster.nodes.ray_folder import RayFolder, published_heads
from cluster.nodes.ray_head import RayHead
from cluster.nodes.ray_token import MODE_VARIABLE, ensure_token, refuse_open_ray, require_token, use_token

_OBJECT_STORE_BYTES = 128 * 2**20
_CONNECT_TIMEOUT_S = 5.0
_SHUTDOWN_S = 8.0
_REDIS_VARIABLE = "RAY_REDIS_ADDRESS"

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RayConnection:
    """This process's connection, which also ends with the process.

    Attributes:
        folder: the files of a local cluster.
    """

    folder: RayFolder | None = None

    def close(self) -> None:
        """Disconnects, and ends a local cluster, even one whose processes hang."""
        node = ray._private.worker._global_node
        shutdown = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
        shutdown.start()
        shutdown.join(_SHUTDOWN_S)
        if shutdown.is_alive() and self.folder is not None:
            _end_ray(node)
            shutdown.join(_SHUTDOWN_S)
        if shutdown.is_alive():  # it waits for what hangs, for minutes; so would Ray's own handler at the exit
            atexit.register(_leave)
        if self.folder is not None:
            self.folder.close()


def connect(config: BatonConfig, report: Report) -> RayConnection | None:
    """Connects to Ray or starts it. Returns ``None`` if this process is connected already.

    Raises:
        ConfigError: Ray cannot be reached or started, or its token is missing or wrong.
    """
    if ray.is_initialized():
        return None
    # Dashboard, usage statistics and log forwarding are unused here, and cost start-up time and idle CPU.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray's own errors come in colours, to files as well
    options: dict[str, Any] = {"namespace": config.ray.namespace, "logging_level": "error", "log_to_driver": False}
    if config.ray.address is None:
        return _start_local(config, options, report)
    return _join(config.ray.address, options, report)


def log_folder() -> str | None:
    """The folder with the output of this node's processes, or ``None`` when Ray does not say."""
    node = ray._private.worker._global_node  # Ray has no public API for this
    return str(node.get_logs_dir_path()) if node is not None else None


def _start_local(config: BatonConfig, options: dict[str, Any], report: Report) -> RayConnection:
    report("starting a local Ray cluster")
    refuse_open_ray()
    ensure_token()
    use_token()
    for name, value in (LOCAL_RAY_VARIABLES | worker_variables()).items():
        os.environ.setdefault(name, value)
    os.environ.pop(_REDIS_VARIABLE, None)  # a local cluster ends with this process, and must not share another's store
    folder = RayFolder()
    connection = RayConnection(folder)
    options |= {
        "address": "local",  # without it, ray connects to the last cluster that was started on this machine
        "num_cpus": config.ray.local_cpus,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(folder.path),
    }
    try:
        _init(options)
    except BaseException as error:  # Ray raises Exception itself when a node takes too long
        connection.close()
        if not isinstance(error, Exception):
            raise
        raise ConfigError(
            f"A local Ray cluster could not be started: {error}. If the machine is busy, try again "
            "later, or set ray.address to a running Ray cluster."
        ) from error
    return connection


def _join(address: str, options: dict[str, Any], report: Report) -> RayConnection:
    report(f"connecting to the Ray cluster at {address}")
    connection = RayConnection()
    try:
        head_address = _find_head(address)
        _prepare_token(head_address, report)
        _init(options | {"address": head_address})
    except BaseException as error:
        connection.close()
        if isinstance(error, BatonError) or not isinstance(error, Exception):
            raise
        raise ConfigError(
            f"Ray cannot be reached at ray.address {address}: {error}. "
            "Start it with `baton node start`, or set ray.address to null for a local cluster."
        ) from error
    return connection


def _init(options: dict[str, Any]) -> None:
    with signals_deferred():
        ray.init(**options)


def _prepare_token(head_address: str, report: Report) -> None:
    """Lets this process send the token where the cluster asks for it.

    Raises:
        ConfigError: the token is missing or wrong.
        OSError: the address refuses connections, which Ray takes minutes to detect.
    """
    host, _, port = head_address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    if RayHead(head_address, None).asks_for_token():
        RayHead(head_address, require_token()).check()
        use_token()
    elif os.environ.get(MODE_VARIABLE, "").lower() != "token":
        report(
            f"warning: the Ray cluster at {head_address} asks for no token, so anyone who reaches its ports can run "
            "code there. Start it with `baton node start`, or set RAY_AUTH_MODE=token where it is started."
        )


def _leave() -> None:
    """Ends this process, which Ray still uses in other threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _end_ray(node: Any) -> None:
    """Ends the processes of a local Ray at once, with all that they have started."""
    pids = [info.process.pid for infos in list(node.all_processes.values()) for info in infos] if node else []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children(recursive=True):
                end_process(child.pid)
        end_process(pid)


def _find_head(address: str) -> str:
    """``host:port`` of the head; ``auto`` means the cluster that this machine belongs to.

    Raises:
        ConfigError: it belongs to several.
        ConnectionError: it belongs to none.
    """
    if address != "auto":
        return address
    heads = published_heads()
    if len(heads) > 1:
        raise ConfigError(f"This machine belongs to several clusters; set ray.address to one of {', '.join(heads)}.")
    return heads[0] if heads else str(ray._private.services.canonicalize_bootstrap_address(address))
