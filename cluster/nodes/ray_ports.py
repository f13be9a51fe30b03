"""The ports on which Ray listens on a machine that ``baton node`` starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.process.ports import PortRange

DEFAULT_FIRST = 6379
DEFAULT_WORKERS = PortRange(10_002, 10_999)
_HEAD_ONLY = ("port", "ray-client-server-port")
_SERVICES = (
    "port",  # the global control store (GCS)
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "ray-client-server-port",
)
"""Options of ``ray start``, in the order of the table in docs/machines.md."""


@dataclass(frozen=True, slots=True)
class RayPorts:
    """Consecutive ports for Ray's services from ``first`` on, and a range for the processes of actors and drivers."""

    first: int = DEFAULT_FIRST
    workers: PortRange = DEFAULT_WORKERS

    @property
    def node_manager(self) -> int:
        return self.first + _SERVICES.index("node-manager-port")

    def options(self, *, is_head: bool) -> Iterator[str]:
        """Options of ``ray start``."""
        for port, option in enumerate(_SERVICES, self.first):
            if is_head or option not in _HEAD_ONLY:
                yield f"--{option}={port}"
        yield f"--min-worker-port={self.workers.first}"
        yield f"--max-worker-port={self.workers.last}"
