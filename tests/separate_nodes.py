"""A cluster whose nodes are hosts of their own, joined by `baton node`; the head's host runs `baton up`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.namespaces import Host
from tests.running_cluster import RunningCluster

RAY_PORT, HTTP_PORT = 6379, 8000
WORKER_PORTS = "20000-20009"
START_S = 240.0
BATON = [sys.executable, "-c", "from cluster.cli.command import main; main()"]
_ROOT = Path(__file__).parents[1]
_RAY_VARIABLES = {
    # A node is declared dead after some seconds instead of half a minute.
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}


@dataclass
class SeparateNodes:
    """Nodes, of which only those that join run workers.

    Attributes:
        head: the host of the head.
        members: the other hosts by name.
        logs: a folder for the output of all programs, and for the cluster's token.
        joined: the programs that are the other nodes, by name.
        more_variables: additional environment of all programs.
    """

    head: Host
    members: Mapping[str, Host]
    logs: Path
    joined: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    more_variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def cluster(self) -> RunningCluster:
        return RunningCluster(f"http://{self.head.address}:{HTTP_PORT}")

    @property
    def all(self) -> tuple[Host, ...]:
        return self.head, *self.members.values()

    @property
    def variables(self) -> dict[str, str]:
        """The environment of all programs."""
        own = {"RAY_AUTH_TOKEN_PATH": str(self.logs / "token"), "PYTHONPATH": str(_ROOT)}
        return {**_RAY_VARIABLES, **own, **self.more_variables}

    @property
    def configuration_file(self) -> Path:
        return self.logs / "config.yaml"

    def log_of(self, host: Host, command: str) -> Path:
        return self.logs / f"{host.namespace}-{command}.log"

    def start_head(self) -> None:
        self._start(self.head, ["node", "start", "--address", f"{self.head.address}/24"])
        self.wait_for(lambda: "the head is ready" in self.log_of(self.head, "node").read_text(), "the head")

    def join(self, name: str, pool: str, num_cpus: int = 8) -> None:
        """Makes a host a node for a pool, and waits until it is."""
        host = self.members[name]
        arguments = ["node", "join", f"{self.head.address}:{RAY_PORT}", "--pool", pool, "--cpus", f"{num_cpus}"]
        self.joined[name] = self._start(host, arguments)
        self.wait_for(lambda: "has joined" in self.log_of(host, "node").read_text(), name)

    def up(self, settings: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> None:
        """Starts a cluster on the nodes, and waits until ``baton up`` says that it is ready.

        That is later than `/ready`, which one worker in each pool is enough for. The arguments are those of
        :meth:`begin_up`.
        """
        self.begin_up(settings, variables)
        log = self.log_of(self.head, "up")
        self.wait_for(lambda: self.cluster.endpoint in log.read_text().splitlines(), "the cluster")

    def begin_up(self, settings: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> None:
        """Starts ``baton up``.

        Args:
            settings: of its configuration, beside those that these nodes need.
            variables: additional environment of ``baton up``.
        """
        configuration = {
            **settings,
            "ray": {"address": f"{self.head.address}:{RAY_PORT}", "start_timeout_s": START_S},
            "router": {"host": self.head.address, "port": HTTP_PORT, **settings.get("router", {})},
            "network": {"ports": WORKER_PORTS},
            # The hosts are one machine after all.
            "kv_transfer": {"shared_memory": "off", **settings.get("kv_transfer", {})},
        }
        self.configuration_file.write_text(yaml.safe_dump(configuration))
        self._start(self.head, ["up", "-c", str(self.configuration_file)], variables)

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Waits until a condition is true, and meanwhile takes its errors for a no.

        Raises:
            TimeoutError: it takes too long, or a program of a host ends.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not any(host.has_ended() for host in self.all):
            try:
                if condition():
                    return
            except (httpx.HTTPError, ValueError):
                pass
            time.sleep(0.5)
        texts = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(self.logs.glob("*.log"))]
        raise TimeoutError(f"{what} did not start\n" + "\n".join(texts))

    def _start(
        self, host: Host, arguments: list[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts baton on a host."""
        environment = {**self.variables, **(variables or {})}
        return host.start([*BATON, *arguments], self.log_of(host, arguments[0]), environment)
