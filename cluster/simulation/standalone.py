"""Simulated workers in a process of their own, without a cluster: ``python -m cluster.simulation.standalone -c FILE``.

Prints one line of JSON when all of them serve: a list with a ``WorkerInfo`` for each. They are
there until the standard input ends, so that they never outlive whoever started them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from baton.core.errors import BatonError
from baton.core.roles import POOLS
from baton.process.garbage import collect_rarely
from baton.process.without_torch import do_without_torch
from cluster.config.config import BatonConfig, load_config
from cluster.simulation.host import ServedModel, SimulatedWorkerHost

_HOST = "127.0.0.1"
SECRET = bytes(32)
"""The secret of these workers, which is none: they serve measurements on this machine and compute nothing."""


class StandaloneWorkers:
    """The configured workers of both pools, which listen on this machine only.

    Args:
        config: must have a ``simulation.profile``.
    """

    def __init__(self, config: BatonConfig) -> None:
        self._config = config
        self._credentials = config.security.credentials(SECRET)
        self._hosts: list[SimulatedWorkerHost] = []

    async def start(self) -> list[dict[str, Any]]:
        """Starts the workers. Returns the description of each.

        Raises:
            ConfigError: the profile or the model is unknown or invalid.
        """
        model = ServedModel(self._config.model)
        infos = []
        for pool in POOLS:
            for number in range(self._config.pool(pool).workers):
                host = SimulatedWorkerHost(f"{pool}-{number + 1}", pool, self._config, _HOST, self._credentials)
                self._hosts.append(host)
                infos.append(await host.start(model))
        return infos

    async def stop(self) -> None:
        await asyncio.gather(*(host.stop() for host in self._hosts))


async def serve_until_eof(config: BatonConfig) -> None:
    """Serves until the standard input ends. Raises the errors of :meth:`StandaloneWorkers.start`."""
    workers = StandaloneWorkers(config)
    try:
        infos = await workers.start()
        collect_rarely()  # as real workers do; a full collection would hold up all streams for half a second
        sys.stdout.write(json.dumps(infos) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await workers.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.simulation.standalone", description=__doc__)
    parser.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        uvloop.run(serve_until_eof(load_config(options.config)))
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    do_without_torch()
    sys.exit(main())
