"""A real cluster: Ray, gRPC, HTTP and the default model. One per test module, since it takes ten seconds to start."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cluster.config import BatonConfig
from cluster.launch import Cluster

MODEL = "smollm2-135m-instruct"
_SETTLE_TIMEOUT_S = 30.0
_BUSY = ("running", "waiting", "transfers", "kv_blocks_used", "in_flight")
"""What a worker has to do, its own figures and the router's; hand-offs are booked before the last one is 0."""

Settings = dict[str, Any]


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
        """One greedy completion with its token ids, unless told otherwise."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True, **parameters}
        return self.post("/v1/completions", body)

    def workers(self, pool: str | None = None) -> list[dict[str, Any]]:
        pools = self.get("/admin/status")["pools"]
        names = [pool] if pool else list(pools)
        return [worker for name in names for worker in pools[name]["workers"] if worker["state"] != "dead"]

    def metric(self, name: str) -> float:
        """Sum of a metric over its label sets."""
        lines = httpx.get(self.endpoint + "/metrics", timeout=30).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"/metrics has no {name}"
        return sum(values)

    def assert_nothing_leaked(self) -> None:
        """Waits until all workers answer and are idle; then every block must be free or cached."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        workers = self.workers()
        while busy := [worker for worker in workers if any(worker.get(name) != 0 for name in _BUSY)]:
            assert time.monotonic() < deadline, busy
            time.sleep(0.1)
            workers = self.workers()
        assert [worker for worker in workers if worker["kv_blocks_leaked"]] == []


@contextlib.contextmanager
def running_cluster(settings: Settings | None = None) -> Iterator[RunningCluster]:
    """Starts a cluster on a free port and stops it again. Every prompt is handed over unless settings differ."""
    defaults: Settings = {"router": {"port": 0}, "routing": {"local_prefill": "never"}}
    config = BatonConfig.from_dict({**defaults, **(settings or {})})
    cluster = Cluster.start(config, lambda line: None)
    try:
        yield RunningCluster(cluster.endpoint)
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def start_cluster() -> Callable[[Settings], contextlib.AbstractContextManager[RunningCluster]]:
    return running_cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """The module's cluster; a module names its settings in ``SETTINGS``."""
    with running_cluster(getattr(request.module, "SETTINGS", None)) as running:
        yield running
