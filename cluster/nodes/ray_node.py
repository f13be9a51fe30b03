"""Runs a Ray node on this machine, in the foreground: the head of a cluster, or one of its other nodes."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import ray

from baton.core.errors import BatonError, ConfigError, WorkerLostError
from baton.engine.models.model_cache import last_line
from baton.process.parent import tied
from baton.process.stop_signals import StopEvent
from baton.process.worker_environment import LOCAL_RAY_VARIABLES
from cluster.config.network_config import NetworkConfig
from cluster.nodes.node_labels import NodePool
from cluster.nodes.ray_folder import RayFolder
from cluster.nodes.ray_head import RayHead, check_versions
from cluster.nodes.ray_ports import RayPorts
from cluster.nodes.ray_token import MODE_VARIABLE, ensure_token, refuse_open_ray, require_token

_OBJECT_STORE_BYTES = 128 * 2**20
"""baton sends nothing large through Ray."""
_ENDED = re.compile(r"-- (\S+ \[exit code=[^\]]*\])$", re.MULTILINE)
"""How Ray names a process whose end ends its node."""
_POLL_S = 0.5
_START_TIMEOUT_S = 120.0
_PAUSE_S = 2.0
_END_S = 30.0
"""Time limit for Ray's processes to end once the node is drained."""

Report = Callable[[str], None]


class NodeStartError(BatonError):
    """Ray did not start on this machine."""

    code = "node_start_failed"


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What a machine offers.

    Attributes:
        address: of this machine, or a network in which it has one; ``None``: the one that faces the head.
        num_cpus, num_gpus: ``None``: all that the machine has.
        labels: of the node, beside that of its pool.
        drain_timeout_s: how long requests may continue when the node leaves.
    """

    pool: NodePool = NodePool.ANY
    address: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: RayPorts = field(default_factory=RayPorts)
    drain_timeout_s: float = 600.0


def run_head(options: NodeOptions, report: Report, stop: StopEvent) -> None:
    """Runs the head of a new cluster until ``stop`` is set.

    Raises:
        BatonError: Ray does not start, ends by itself, or would run without authentication.
    """
    refuse_open_ray()
    default = "" if options.address else str(ray.util.get_node_ip_address())  # looks for a way to the internet
    address = _address_here(options, default)
    _refuse_taken(address, options.ports.first)
    head = RayHead(f"{address}:{options.ports.first}", ensure_token())
    with RayFolder() as folder, RayProcess(_command(options, folder, address, None), folder, 0.0) as process:
        if not _wait_until_joined(process, head, address, options, stop):
            return
        head.publish_baton()
        folder.publish_head(head.address)
        report(f"the head is ready at {head.address}; its files are in {folder.path}")
        report(f"on the other machines: baton node join {head.address} --pool prefill (or decode)")
        process.wait(stop)
        if not stop.is_set():
            raise WorkerLostError(f"Ray's head has ended: {process.last_line()}")


def run_member(head_address: str, options: NodeOptions, report: Report, stop: StopEvent) -> None:
    """Joins a cluster and stays until ``stop`` is set, then drains this node.

    A node that its head has declared dead, since no word of it came for a while, joins again by itself.

    Raises:
        BatonError: the head cannot be reached at first, refuses the token or has other versions, or Ray does not start.
    """
    refuse_open_ray()
    head = RayHead(head_address, require_token())
    head.check()
    address = _address_here(options, _address_towards(head_address))
    has_joined = False
    while not stop.is_set():
        check_versions(head)
        with RayFolder() as folder:
            command = _command(options, folder, address, head_address)
            with RayProcess(command, folder, options.drain_timeout_s) as process:
                try:
                    if _wait_until_joined(process, head, address, options, stop):
                        has_joined = True
                        folder.publish_head(head_address)
                        report(f"{address} has joined {head_address}; its files are in {folder.path}")
                        process.wait(stop)
                except NodeStartError as error:
                    if not has_joined:
                        raise
                    report(error.message)
                if stop.is_set():
                    report("draining this node; Ctrl-C again ends it at once")
                    process.end(drains=head.is_reachable())
                    return
                report(f"this node has left the cluster and joins it again: {process.last_line()}")
        _wait_for_head(head, report, stop)


def _address_here(options: NodeOptions, default: str) -> str:
    """The address of this node. Raises :class:`ConfigError` if it has none that Ray takes."""
    address = NetworkConfig(address=options.address).address_here(default)
    if ipaddress.ip_address(address.strip("[]")).is_loopback:
        raise ConfigError(
            f"A node cannot have the loopback address {address}, since Ray uses another one instead. Name an address "
            "that other machines reach, in --address and for the head, or leave --address out."
        )
    return address


def _refuse_taken(address: str, port: int) -> None:
    """Raises :class:`NodeStartError` if another process listens at the head's port, for which Ray would take it."""
    host = address.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            raise NodeStartError(
                f"The head cannot listen at {address}:{port}: {error.strerror}. End what uses this port, perhaps "
                "another head, or choose another one with --port."
            ) from error


def _command(options: NodeOptions, folder: RayFolder, address: str, head_address: str | None) -> list[str]:
    labels = {**options.pool.labels, **options.labels}
    num_cpus, num_gpus = (0, 0) if options.pool is NodePool.NONE else (options.num_cpus, options.num_gpus)
    command = [sys.executable, "-m", "cluster.nodes.node_process", "start", "--block", "--disable-usage-stats"]
    command += ["--head", "--include-dashboard=false"] if head_address is None else [f"--address={head_address}"]
    command += [f"--node-ip-address={address.strip('[]')}", f"--temp-dir={folder.path}"]
    command += [f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    command += [f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}"] if labels else []
    command += [f"--num-cpus={num_cpus}"] if num_cpus is not None else []
    command += [f"--num-gpus={num_gpus}"] if num_gpus is not None else []
    return [*command, *options.ports.options(is_head=head_address is None)]


class RayProcess:
    """``ray start --block``, which ends all processes of its node when it ends.

    Args:
        drain_timeout_s: limit of the time from SIGTERM to the end of the node's last worker.
    """

    def __init__(self, command: list[str], folder: RayFolder, drain_timeout_s: float) -> None:
        self._log = folder.path / "ray-start.log"
        self._log.parent.mkdir(exist_ok=True)
        self._drain_timeout_s = drain_timeout_s
        variables = {
            MODE_VARIABLE: "token",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": f"{drain_timeout_s:g}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**LOCAL_RAY_VARIABLES, **os.environ, **variables},
                start_new_session=True,  # Ctrl-C reaches this process alone
            )

    def __enter__(self) -> RayProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end(drains=False)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, stop: StopEvent) -> None:
        """Waits until the process ends or ``stop`` is set."""
        while not self.has_ended() and not stop.wait(_POLL_S):
            pass

    def end(self, *, drains: bool) -> None:
        """Ends the node.

        Args:
            drains: Ray first declares that the node is leaving, and waits until its workers are gone. A second Ctrl-C
                (KeyboardInterrupt) skips this.
        """
        if drains and not self.has_ended():
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.wait(self._drain_timeout_s + _END_S)
        if not self.has_ended():
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_END_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()  # ends the others too, since their parent's death kills them
            self._process.wait()

    def last_line(self) -> str:
        """The most informative line of Ray's output: the processes that have ended, else the last error."""
        ended = _ENDED.findall(self._log.read_text(encoding="utf-8", errors="replace"))
        return ", ".join(ended) or last_line(self._log)


def _wait_until_joined(process: RayProcess, head: RayHead, address: str, options: NodeOptions, stop: StopEvent) -> bool:
    """Returns False if ``stop`` is set before. Raises :class:`NodeStartError` if Ray ends or takes too long."""
    for _ in range(int(_START_TIMEOUT_S / _POLL_S)):
        if process.has_ended():
            raise NodeStartError(f"Ray did not start on this machine: {process.last_line()}")
        if head.has_node(address.strip("[]"), options.ports.node_manager):
            return True
        if stop.wait(_POLL_S):
            return False
    raise NodeStartError(
        f"Ray did not start on this machine within {_START_TIMEOUT_S:g} s: {process.last_line()}. If the machine is "
        "busy, try again."
    )


def _wait_for_head(head: RayHead, report: Report, stop: StopEvent) -> None:
    """Waits until the head answers. Raises :class:`ConfigError` if it refuses the token."""
    is_reported = False
    while not stop.wait(_PAUSE_S):
        try:
            head.check()
            return
        except WorkerLostError as error:
            if not is_reported:
                report(f"waiting for the head: {error.message}")
            is_reported = True


def _address_towards(head_address: str) -> str:
    """The address of this machine from which it reaches the head."""
    host, _, port = head_address.rpartition(":")
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
