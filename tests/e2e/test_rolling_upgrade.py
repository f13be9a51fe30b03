"""A rolling upgrade replaces every worker under load, through two routers: no request fails, and all tokens are those
of an idle cluster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.core.errors import BatonError, ConfigError
from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster
from tests.e2e.conftest import start
from tests.running_cluster import MODEL, RunningCluster, wait_for

UPGRADE_S = 240.0
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "router": {"port": 0, "replicas": 2},
    "routing": {"local_prefill": "never"},
    "prefill": {"kv_blocks": 512},
    "decode": {"kv_blocks": 512},
}
BODIES: list[dict[str, Any]] = [
    {"prompt": "The capital of France is", "temperature": 0},
    {"prompt": "Once upon a time there was", "temperature": 0.9, "seed": 7},
    {"prompt": "A recipe for bread: " * 8, "temperature": 1.0, "top_p": 0.9, "seed": 11},
]


def changed(**sections: dict[str, Any]) -> BatonConfig:
    return BatonConfig.from_dict(
        {**SETTINGS, **{name: {**SETTINGS.get(name, {}), **sections[name]} for name in sections}}
    )


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    cluster = start(BatonConfig.from_dict(SETTINGS))
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def cluster(started: Cluster) -> RunningCluster:
    return RunningCluster(started.endpoint)


@pytest.fixture(scope="module")
def expected(cluster: RunningCluster) -> list[list[int]]:
    return [answer(cluster, body) for body in BODIES]


def answer(cluster: RunningCluster, body: dict[str, Any]) -> list[int]:
    body = {"model": MODEL, "max_tokens": 48, "ignore_eos": True, **body}
    return [token for tokens in cluster.stream(body) for token in tokens]


def of_routers(cluster: RunningCluster, count: str) -> list[int]:
    """A count of requests of each router."""
    return [router["requests"][count] for router in cluster.get("/admin/status")["routers"]]


def upgrade(started: Cluster, config: BatonConfig) -> None:
    started.begin_upgrade(config)
    wait_for_end(started)


def wait_for_end(started: Cluster) -> None:
    give_up_at = time.monotonic() + UPGRADE_S
    while not started.upgrade_ended():
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


@contextlib.contextmanager
def streams(cluster: RunningCluster, expected: list[list[int]]) -> Iterator[Callable[[], int]]:
    """Streams all bodies again and again, and checks every token; yields a function that counts finished rounds."""
    over, rounds = threading.Event(), [0, 0]

    def keep_asking(index: int) -> None:
        while not over.is_set():
            assert [answer(cluster, body) for body in BODIES] == expected
            rounds[index] += 1

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(keep_asking, index) for index in range(2)]
        try:
            yield lambda: sum(rounds)
        finally:
            over.set()
        for future in asking:
            future.result()


def test_all_workers_are_replaced_under_streams(
    started: Cluster, cluster: RunningCluster, expected: list[list[int]]
) -> None:
    before = {worker["pid"] for worker in cluster.workers()}
    failed = cluster.get("/admin/status")["requests"]["failed"]
    with streams(cluster, expected) as num_rounds:
        wait_for(lambda: all(of_routers(cluster, "in_flight")), "streams on both routers")
        finished = of_routers(cluster, "finished")
        upgrade(started, changed(engine={"attention_backend": "torch_sdpa"}, decode={"max_num_seqs": 8}))
        assert num_rounds() > 0
        assert all(now > then for now, then in zip(of_routers(cluster, "finished"), finished, strict=True))
    workers = cluster.workers()
    assert [(worker["id"], worker["state"]) for worker in workers] == [("prefill-2", "ready"), ("decode-2", "ready")]
    assert not before & {worker["pid"] for worker in workers}
    assert [answer(cluster, body) for body in BODIES] == expected
    assert cluster.get("/admin/status")["requests"]["failed"] == failed
    cluster.assert_nothing_leaked()


def test_a_second_upgrade_is_refused_and_a_broken_one_is_rolled_back(
    started: Cluster, cluster: RunningCluster, expected: list[list[int]]
) -> None:
    before = cluster.workers()
    with streams(cluster, expected):
        started.begin_upgrade(changed(decode={"kv_blocks": 4}, speculation={"draft": "/no/such/draft"}))
        first, started._upgrade = started._upgrade, None
        with pytest.raises(ConfigError, match="An upgrade of this cluster runs already"):
            upgrade(started, changed(engine={"threads": 1}))
        started._upgrade = first
        with pytest.raises(BatonError, match=r"(?s)no/such/draft.*All workers run with the old settings again"):
            wait_for_end(started)
    assert [worker["pid"] for worker in cluster.workers()] == [worker["pid"] for worker in before]
    with pytest.raises(ConfigError, match=r"ray\.namespace: baton → elsewhere; processes that differ"):
        upgrade(started, changed(ray={"namespace": "elsewhere"}))
    cluster.assert_nothing_leaked()


def test_workers_with_another_kv_layout_are_never_paired_with_the_old_ones(
    started: Cluster, cluster: RunningCluster
) -> None:
    with ThreadPoolExecutor(1) as pool:
        upgrading = pool.submit(upgrade, started, changed(engine={"kv_cache": "int8"}))
        while not upgrading.done():
            assert len(answer(cluster, BODIES[0])) == 48
        upgrading.result()
    assert cluster.get("/admin/status")["requests"]["failed"] == 0
    cluster.assert_nothing_leaked()
