"""Faults of the host under a running cluster: clocks that jump, no memory, full disks. Nothing hangs or is lost."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from baton.core.roles import POOLS
from baton.engine.models.default_model import ensure_default_model
from tests.clocks import Clocks
from tests.full_disk import FILLER, fill, mounted, why_no_mounts
from tests.node_memory import NodeMemory
from tests.running_cluster import MODEL, RunningCluster, wait_for

BATON = [sys.executable, "-m", "cluster.cli.cli"]
DISK_BYTES = 256 * 2**20
NUM_TOKENS = 90
HOURS_S = 3600


@dataclass(frozen=True)
class Machine:
    """A cluster on a machine whose clocks and disk a test can disturb.

    Attributes:
        disk: has Ray's files and those of `baton up`; a disk of its own, where one can be mounted.
        no_disk: why it is not a disk of its own; empty if it is.
        memory: that of the machine, as Ray sees it.
    """

    cluster: RunningCluster
    disk: Path
    clocks: Clocks
    no_disk: str
    memory: NodeMemory
    up: subprocess.Popen[bytes]
    environment: dict[str, str]

    @property
    def log(self) -> str:
        return (self.disk / "up.log").read_text()

    def pids(self) -> list[int]:
        """The Python processes of the cluster."""
        own = [self.up.pid, *(process.pid for process in psutil.Process(self.up.pid).children(recursive=True))]
        return [pid for pid in own if psutil.pid_exists(pid) and "raylet" not in psutil.Process(pid).name()]

    def baton(self, *arguments: str) -> str:
        done = subprocess.run(
            [*BATON, *arguments], env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tokens(self, on_token: Callable[[int], None] = lambda count: None, **parameters: Any) -> list[int]:
        """A stream's tokens; ``on_token`` gets their number after each event."""
        body = {"model": MODEL, "prompt": list(range(2, 60)), "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 7}
        found: list[int] = []
        for new in self.cluster.stream({**body, **parameters}):
            found += new
            on_token(len(found))
        return found

    def reasons(self, pool: str = "decode") -> list[str]:
        """Why workers of a pool have died or are not ready."""
        return [worker["reason"] for worker in self.cluster.get("/admin/status")["pools"][pool]["workers"]]

    def assert_ready(self) -> None:
        wait_for(lambda: self.cluster.states() == ["ready"] * 2, "the pools to be complete")
        self.cluster.assert_nothing_leaked()


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # Ray's sockets need a short path
        disk = Path(name, "d")
        disk.mkdir()
        no_disk = why_no_mounts(disk)
        with nullcontext() if no_disk else mounted(disk, DISK_BYTES):
            yield from running(Path(name), disk, no_disk)


def running(folder: Path, disk: Path, no_disk: str) -> Iterator[Machine]:
    clocks, memory = Clocks(folder), NodeMemory(folder / "memory")
    memory.use(0.5)
    environment = {
        **os.environ,
        **clocks.variables(),
        "TMPDIR": str(disk),
        "BATON_CACHE": str(disk / "cache"),
        "RAY_memory_monitor_refresh_ms": "1000",  # time for a test to end the shortage before Ray ends another worker
    }
    config = {
        "model": str(ensure_default_model()),
        "served_model_name": MODEL,
        "dtype": "float32",
        "ray": {"num_cpus": 8},
        "router": {"port": 0, "worker_wait_s": 60.0},
        "routing": {"local_prefill": "never"},
        "engine": {"decoder": "transformers", "threads": 1},
        "prefill": {"kv_blocks": 1024},
        "decode": {"kv_blocks": 1024},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with (disk / "up.log").open("wb") as log, (folder / "out").open("wb") as out:
        command = [*BATON, "up", "-c", str(folder / "config.yaml")]
        up = subprocess.Popen(
            command if memory.why_not() else memory.command(command), env=environment, stdout=out, stderr=log
        )
    try:
        deadline = time.monotonic() + 240
        while not (endpoint := (folder / "out").read_text().strip()):
            is_late = up.poll() is not None or time.monotonic() > deadline
            assert not is_late, (disk / "up.log").read_text()
            time.sleep(0.1)
        yield Machine(RunningCluster(endpoint), disk, clocks, no_disk, memory, up, environment)
    finally:
        up.terminate()
        up.wait(60)


@pytest.mark.parametrize("hours", [5, -5])
def test_a_stream_goes_on_while_clocks_jump(machine: Machine, hours: int) -> None:
    """Those of all processes, or of one worker; before and during the stream."""
    undisturbed, retries = machine.tokens(), machine.cluster.metric("baton_retries_total")
    before = [worker["id"] for worker in machine.cluster.workers()]
    [decode] = machine.cluster.workers("decode")
    machine.clocks.jump(decode["pid"], 2 * hours * HOURS_S)

    def jump(count: int) -> None:
        if NUM_TOKENS // 3 <= count < NUM_TOKENS // 2:
            for pid in machine.pids():
                machine.clocks.jump(pid, hours * HOURS_S)

    assert machine.tokens(jump) == undisturbed
    time.sleep(3)  # the status and the progress of workers are asked for every second or two
    assert machine.tokens() == undisturbed
    assert [worker["id"] for worker in machine.cluster.workers()] == before
    assert machine.cluster.metric("baton_retries_total") == retries
    machine.assert_ready()
    timeline = json.loads(machine.baton("explain", "--last", "--json"))
    longest_ms = max(span["duration_ms"] for span in timeline["spans"])
    assert all(span["duration_ms"] >= 0 for span in timeline["spans"]), timeline["spans"]
    assert longest_ms < HOURS_S * 1e3
    assert "decode" in machine.baton("status")


@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_without_memory_fails_requests_or_is_replaced(machine: Machine, pool: str) -> None:
    undisturbed = machine.tokens()
    [worker] = machine.cluster.workers(pool)
    limits = resource.prlimit(worker["pid"], resource.RLIMIT_AS)
    resource.prlimit(worker["pid"], resource.RLIMIT_AS, (psutil.Process(worker["pid"]).memory_info().vms, limits[1]))
    prompts = [[number, *range(1000, 1600)] for number in range(2, 5)]

    def ask(prompt: list[int]) -> bool:
        answer = httpx.post(
            f"{machine.cluster.endpoint}/v1/completions",
            json={"model": MODEL, "prompt": prompt, "max_tokens": 20, "ignore_eos": True},
            timeout=100,
        )
        assert answer.status_code in (200, 500, 503), answer.text
        return answer.status_code == 200

    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(ask, prompts))  # every one of them ends
    if psutil.pid_exists(worker["pid"]):
        resource.prlimit(worker["pid"], resource.RLIMIT_AS, limits)
    machine.assert_ready()
    assert machine.tokens() == undisturbed


def test_streams_go_on_when_rays_memory_monitor_ends_a_worker(machine: Machine) -> None:
    """Of the processes, Ray ends the one that was started last: here a worker."""
    if problem := machine.memory.why_not():
        pytest.skip(problem)
    undisturbed = machine.tokens()
    youngest = max(machine.cluster.workers(), key=lambda worker: psutil.Process(worker["pid"]).create_time())
    others = set(machine.pids()) - {youngest["pid"]}

    def take_memory(count: int) -> None:
        if count >= NUM_TOKENS // 3 and psutil.pid_exists(youngest["pid"]):
            machine.memory.use(0.951)
            wait_for(lambda: not psutil.pid_exists(youngest["pid"]), "the end of the worker")
            machine.memory.use(0.5)

    assert machine.tokens(take_memory) == undisturbed
    machine.assert_ready()
    assert others <= set(machine.pids())
    reason = "Ray ended it because its node ran out of memory"
    assert [text.startswith(reason) for text in machine.reasons(youngest["pool"]) if text] == [True]
    assert f"{youngest['id']} is lost: {reason}" in machine.log
    assert reason in machine.baton("status")
    assert machine.tokens() == undisturbed


def test_a_cluster_serves_on_a_full_disk_and_replaces_workers_when_there_is_space(machine: Machine) -> None:
    """Ray's files, all logs and baton's own record are on it. Ray starts no processes on a full disk."""
    if machine.no_disk:
        pytest.skip(machine.no_disk)
    undisturbed = machine.tokens()
    fill(machine.disk)
    assert machine.tokens() == undisturbed
    [worker] = machine.cluster.workers("decode")
    psutil.Process(worker["pid"]).kill()
    wait_for(lambda: any("is full, so Ray can start none" in reason for reason in machine.reasons()), "the reason")
    assert machine.up.poll() is None
    (machine.disk / FILLER).unlink()
    machine.assert_ready()
    assert machine.tokens() == undisturbed
    machine.baton("reload")
    assert "Reloaded: no API keys" in machine.log
