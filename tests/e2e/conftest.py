"""A real cluster: Ray, gRPC, HTTP and the default model. It takes ten seconds or more to start, so modules with equal
settings run consecutively and share a cluster. All clusters of this process share one Ray cluster."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster
from cluster.nodes.ray_connection import connect

MODEL = "smollm2-135m-instruct"
_SETTLE_TIMEOUT_S = 30.0
_BUSY = ("running", "waiting", "transfers", "kv_blocks_used", "in_flight")
"""Figures of a worker's load, by the worker and the router; finished hand-offs are recorded before the last is 0."""

Settings = dict[str, Any]

EXACT: Settings = {"dtype": "float32", "prefill": {"kv_blocks": 1024}, "decode": {"kv_blocks": 1024}}
"""Settings of most modules, with which tokens can be compared. Modules that use them leave one worker in each pool."""

SMALL_CHUNKS: Settings = {
    "dtype": "float32",
    "prefill": {"kv_blocks": 2048, "chunk_tokens": 64},
    "decode": {"kv_blocks": 2048},
    "kv_transfer": {"part_bytes": 65536},
    "router": {"port": 0, "worker_wait_s": 60.0},
}
"""Settings of modules that observe a prompt while it is computed and handed over."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups the modules of this folder with equal ``SETTINGS`` at the position of the first of them."""
    first: dict[str, int] = {}

    def place(item: pytest.Item) -> int:
        settings = getattr(getattr(item, "module", None), "SETTINGS", None)
        shares = settings is not None and item.path.parent == Path(__file__).parent
        return first.setdefault(json.dumps(settings, sort_keys=True) if shares else str(item.path), len(first))

    items.sort(key=place)  # keeps the order of equals


@dataclass(frozen=True)
class RunningCluster:
    """A cluster and blocking calls to its endpoint."""

    endpoint: str

    def get(self, path: str) -> Any:
        response = httpx.get(self.endpoint + path, timeout=30)
        response.raise_for_status()
        return response.json()

    def post(self, path: str, body: Settings, timeout_s: float = 120.0) -> Any:
        response = httpx.post(self.endpoint + path, json=body, timeout=timeout_s)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any, **parameters: Any) -> Any:
        """One completion, by default greedy and with token ids."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True, **parameters}
        return self.post("/v1/completions", body)

    def workers(self, pool: str | None = None) -> list[dict[str, Any]]:
        pools = self.get("/admin/status")["pools"]
        names = [pool] if pool else list(pools)
        return [worker for name in names for worker in pools[name]["workers"] if worker["state"] != "dead"]

    def metric(self, name: str) -> float:
        """The sum of a metric over its label sets."""
        lines = httpx.get(self.endpoint + "/metrics", timeout=30).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"/metrics has no {name}"
        return sum(values)

    def assert_nothing_leaked(self) -> None:
        """Waits until all workers answer and are idle, then checks that every block is free or cached."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        workers = self.workers()
        while busy := [worker for worker in workers if any(worker.get(name) != 0 for name in _BUSY)]:
            assert time.monotonic() < deadline, busy
            time.sleep(0.1)
            workers = self.workers()
        assert [worker for worker in workers if worker["kv_blocks_leaked"]] == []


def start(config: BatonConfig, report: Callable[[str], None] = lambda line: None) -> Cluster:
    """Starts a cluster on this process's Ray, which outlives it; ``test_cli`` covers the Ray of `baton up`."""
    connect(config, lambda line: None)
    return Cluster.start(config, report)


@contextlib.contextmanager
def running_cluster(settings: Settings | None = None) -> Iterator[RunningCluster]:
    """Runs a cluster on a free port. By default every prompt is handed over."""
    defaults: Settings = {"router": {"port": 0}, "routing": {"local_prefill": "never"}}
    config = BatonConfig.from_dict({**defaults, **(settings or {})})
    cluster = start(config)
    try:
        yield RunningCluster(cluster.endpoint)
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def start_cluster() -> Callable[[Settings], contextlib.AbstractContextManager[RunningCluster]]:
    return running_cluster


class Kept:
    """The cluster of the last module, kept for the next one."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._settings: Settings | None = None
        self._running: RunningCluster | None = None

    def with_settings(self, settings: Settings | None) -> RunningCluster:
        """The running cluster, or a new one. Call :meth:`stop_unless` before."""
        if self._running is None:
            self._running, self._settings = self._stack.enter_context(running_cluster(settings)), settings
        return self._running

    def stop_unless(self, settings: Settings | None) -> None:
        """Stops the cluster unless it has these settings, because a process has one cluster at a time."""
        if settings is None or self._settings != settings:
            self.stop()

    def stop(self) -> None:
        self._running = None
        self._stack.close()


@pytest.fixture(scope="package")
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.stop()
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _no_other_cluster(request: pytest.FixtureRequest, kept: Kept) -> None:
    kept.stop_unless(getattr(request.module, "SETTINGS", None))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, kept: Kept) -> RunningCluster:
    """The module's cluster; a module names its settings in ``SETTINGS``."""
    return kept.with_settings(getattr(request.module, "SETTINGS", None))
