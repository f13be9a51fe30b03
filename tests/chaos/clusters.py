"""The clusters that faults happen to: all on this machine's network, or each worker on a host of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from baton.core.roles import POOLS
from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster
from tests.clocks import Clocks
from tests.namespaces import Host, hosts
from tests.separate_nodes import SeparateNodes

SIZE = 2
"""Workers in each pool."""
TIMELINES_KEPT = 50
"""So few that the memory of the router is watched only when all of them are there. Clients read theirs at once."""
_CPUS_OF_NODE = 2
"""Room for a second worker, to which Ray prefers an empty node."""
_POOL = {"workers": SIZE, "kv_blocks": 1024, "max_num_seqs": 4}  # few sequences in a step, so that some wait
SETTINGS: Mapping[str, Any] = {
    "dtype": "float32",
    "engine": {"threads": 1},
    "prefill": {**_POOL, "chunk_tokens": 64},
    "decode": _POOL,
    "kv_transfer": {"part_bytes": 65536},
    "admission": {"mode": "off"},  # a refusal for a missed target would look like a failure
    "routing": {"local_prefill": "never"},
    "router": {"timelines_kept": TIMELINES_KEPT},
}
"""Settings with which tokens can be compared, and hand-offs have parts."""


@dataclass(frozen=True)
class Running:
    """A cluster that runs.

    Attributes:
        hosts: those of the workers, by address.
        pids: finds its processes.
        clocks: those of its processes.
    """

    endpoint: str
    hosts: Mapping[str, Host]
    pids: Callable[[], Sequence[int]]
    clocks: Clocks


@contextmanager
def on_this_machine(folder: Path, report: Callable[[str], None]) -> Iterator[Running]:
    """Runs a cluster of this machine's only host, with all of its files in ``folder``."""
    config = BatonConfig.from_dict({**SETTINGS, "router": {**SETTINGS["router"], "port": 0}})
    clocks = Clocks(folder)
    os.environ.update(_variables(folder, clocks))  # the cluster's processes inherit it
    tempfile.tempdir = None  # read the environment again
    cluster = Cluster.start(config, report)
    try:
        yield Running(cluster.endpoint, {}, own_processes, clocks)
    finally:
        cluster.stop()


@contextmanager
def on_separate_hosts(folder: Path, report: Callable[[str], None]) -> Iterator[Running]:
    """Runs a cluster of five hosts, the head and one for each worker, with all of its files in ``folder``."""
    names = [f"{pool}{number}" for pool in POOLS for number in range(SIZE)]
    with hosts(("head", *names)) as found:
        clocks = Clocks(folder)
        nodes = SeparateNodes(found.pop("head"), found, folder, more_variables=_variables(folder, clocks))
        nodes.start_head()
        for name in names:
            nodes.join(name, name.rstrip("0123456789"), _CPUS_OF_NODE)
            report(f"{name} has joined")
        nodes.up(SETTINGS)
        workers = {host.address: host for host in found.values()}
        yield Running(
            nodes.cluster.endpoint, workers, lambda: [pid for host in nodes.all for pid in host.pids()], clocks
        )


def _variables(folder: Path, clocks: Clocks) -> dict[str, str]:
    """The environment of a cluster's programs. Ray's files are in the folder for temporary ones."""
    return {**clocks.variables(), "TMPDIR": str(folder)}


def own_processes() -> list[int]:
    """All processes that this one has started."""
    return [process.pid for process in psutil.Process().children(recursive=True)]
