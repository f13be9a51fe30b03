"""A real cluster: Ray, gRPC, HTTP and the default model. It takes ten seconds or more to start, so modules with equal
settings run consecutively and share a cluster. All clusters of this process share one Ray cluster."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster
from cluster.nodes.ray_connection import connect
from tests.running_cluster import RunningCluster

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
