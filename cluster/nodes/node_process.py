"""Runs ``ray start`` with two differences. Run with ``python -m``.

When a raylet exits normally, for instance because its agents have died, Ray keeps the node running, although the node
can no longer run anything. Here, the node ends with its raylet, so that it can be started again.

When the control store (GCS) of a head dies, Ray ends the head at once. Here, the GCS is restarted if Redis holds its
state. Without Redis, the other processes continue until they have missed it for too long.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from ray._private import node, ray_constants
from ray.scripts import scripts

_PASSWORD_VARIABLE = ray_constants.RAY_REDIS_PASSWORD_ENV
_NORMAL_EXITS = (0, signal.SIGTERM, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit statuses for which Ray does not end the node."""

_RAY: Any = node  # Ray has no public API for this


class WatchedNode(_RAY.Node):  # type: ignore[misc]
    """A node that ends with its raylet, and outlives its GCS."""

    def dead_processes(self) -> list[tuple[str, Any]]:
        """The processes whose death ends the node. Ray asks every second, and ignores those that exit normally."""
        dead: list[tuple[str, Any]] = super().dead_processes()
        for kind, process in dead:
            if kind == ray_constants.PROCESS_TYPE_RAYLET and process.returncode in _NORMAL_EXITS:
                process.returncode = 1
        others = [found for found in dead if found[0] != ray_constants.PROCESS_TYPE_GCS_SERVER]
        if len(others) < len(dead) and self.redis_address is not None:
            self.kill_gcs_server(check_alive=False)
            self.start_gcs_server()
        return others


def start_arguments(arguments: list[str], environment: Mapping[str, str]) -> list[str]:
    """Those of ``ray start``, with the password of Redis, which `ray start` does not take from the environment."""
    password = environment.get(_PASSWORD_VARIABLE)
    return [*arguments, f"--redis-password={password}"] if password else arguments


if __name__ == "__main__":
    _RAY.Node = WatchedNode
    scripts.cli(start_arguments(sys.argv[1:], os.environ), prog_name="ray")
