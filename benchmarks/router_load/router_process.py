"""The router in a process of its own, as its Ray actor runs it but without Ray.

Reads a JSON list of workers from the first line of its standard input, and prints its endpoint. From then on it answers
every line with one line of figures about itself, until the input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import cProfile
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import uvloop

from baton.core.errors import BatonError
from baton.core.roles import POOLS
from baton.process.without_torch import do_without_torch
from benchmarks.router_load.figures import Timeline, stage_summaries
from cluster.autoscaling.observation import PoolCounts
from cluster.config.config import BatonConfig, load_config
from cluster.router_process.router_host import RouterHost
from cluster.simulation.standalone import SECRET
from cluster.telemetry.cluster_metrics import PoolFigures

_MAX_TIMELINES = 300
"""Limit of the evaluated timelines, each of which takes milliseconds to build."""


class _Method:
    """A method of an actor that always returns the same."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def remote(self, *arguments: Any) -> Any:
        return copy.deepcopy(self._answer)


class _Controller:
    """Stands in for the controller: all configured workers are ready, and nothing changes them."""

    def __init__(self, config: BatonConfig) -> None:
        sizes = {pool: count for pool in POOLS if (count := config.pool(pool).workers)}
        figures = {pool: PoolFigures(count, {"ready": count}, {}, count, {}, {}) for pool, count in sizes.items()}
        self.pool_counts = _Method(({pool: PoolCounts(count, ready=count) for pool, count in sizes.items()}, ""))
        self.figures = _Method((figures, 0))
        names = {pool: [f"{pool}-{number + 1}" for number in range(size)] for pool, size in sizes.items()}
        workers = {pool: [{"id": name, "state": "ready"} for name in found] for pool, found in names.items()}
        self.pool_status = _Method({pool: {"target": len(found), "workers": found} for pool, found in workers.items()})
        self.scale = self.change_role = self.pool_status


async def serve(config_file: Path) -> None:
    """Serves until the standard input ends.

    Raises:
        BatonError: the router cannot start.
    """
    config = load_config(config_file)
    host = RouterHost(config.to_dict(), 0, _Controller(config), SECRET)
    endpoint, _ = await host.start()
    for info in json.loads(await _line()):
        await host.add_worker(info)
    _send({"endpoint": endpoint})
    try:
        while await _line():
            _send(await _figures(host))
    finally:
        await host.stop()


async def _figures(host: RouterHost) -> dict[str, Any]:
    """The memory in bytes and in blocks of Python's allocator, and the durations of the last requests' stages."""
    gc.collect()
    num_blocks, rss_bytes = sys.getallocatedblocks(), psutil.Process().memory_info().rss
    newest = await host.admin.requests("newest", _MAX_TIMELINES)
    timelines = [await host.admin.timeline(entry["request_id"]) for entry in newest]
    finished = [_events(timeline) for timeline in timelines]
    return {"rss_bytes": rss_bytes, "num_blocks": num_blocks, "stages": stage_summaries(finished)}


def _events(timeline: dict[str, Any]) -> Timeline:
    return {event["name"]: event["at_ms"] for event in timeline["events"]}


async def _line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def _send(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_load.router_process", description=__doc__)
    parser.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="file for the cProfile profile")
    options = parser.parse_args(arguments)
    profile = cProfile.Profile() if options.profile else None
    if profile is not None:
        profile.enable()
    try:
        uvloop.run(serve(options.config))  # the loop of Ray's actors
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    finally:
        if profile is not None:
            profile.disable()
            profile.dump_stats(options.profile)
    return 0


if __name__ == "__main__":
    do_without_torch()
    sys.exit(main())
