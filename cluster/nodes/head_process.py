"""``ray start --head`` on a node that outlives its control store (GCS). Run with ``python -m``.

Ray itself would end the whole node at once. Here the GCS is started again if Redis has what it knew. Without Redis, the
other processes go on until they have missed it for too long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ray._private import node, ray_constants
from ray.scripts import scripts

_PASSWORD_VARIABLE = ray_constants.RAY_REDIS_PASSWORD_ENV


_RAY: Any = node  # Ray has no public API for this


class HeadNode(_RAY.Node):  # type: ignore[misc]
    """A head that outlives its GCS."""

    def dead_processes(self) -> list[tuple[str, Any]]:
        """The processes whose death ends the node; Ray asks every second."""
        dead: list[tuple[str, Any]] = super().dead_processes()
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
    _RAY.Node = HeadNode
    scripts.cli(start_arguments(sys.argv[1:], os.environ), prog_name="ray")
