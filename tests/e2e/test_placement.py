"""Placement on a Ray of several nodes: every request of ``resources``, and what the user reads when nothing fits.

The nodes are raylets on this machine; their GPUs, memory and labels are pretended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster as RayCluster

from baton.core.errors import DeadlineError
from baton.core.roles import POOLS
from cluster.config.config import BatonConfig, load_config
from cluster.controller.launch import Cluster
from cluster.controller.placement import ACCELERATOR_LABEL
from cluster.controller.worker_pool import WorkerPool
from cluster.registry.workers import WorkerInfo
from tests.credentials import SECRET
from tests.fake_hosts import PlacedHost, local_ray_variables, placement_of
from tests.tiny_tokenizers import write_model_folder

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
GIB = 2**30
READY_S = 180.0
PENDING_S = 1.0
OBJECT_STORE_BYTES = 80 * 2**20

HEAD = {"num_cpus": 4, "memory": 4 * GIB}
PREFILL_NODE = {
    "num_cpus": 32,
    "num_gpus": 4,
    "memory": 256 * GIB,
    "labels": {ACCELERATOR_LABEL: "H100", "tier": "compute"},
}
DECODE_NODE = {
    "num_cpus": 32,
    "num_gpus": 2,
    "memory": 256 * GIB,
    "labels": {ACCELERATOR_LABEL: "H200", "tier": "memory", "rack": "7"},
}


@dataclass
class Nodes:
    """The cluster of this module; node ids by name."""

    ray_cluster: RayCluster
    names: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, **options: Any) -> Any:
        with local_ray_variables():
            node = self.ray_cluster.add_node(object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, **options)
        self.names[node.node_id] = name
        return node


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    ray.shutdown()  # that of the other modules
    found = Nodes(RayCluster())
    found.add("head", **HEAD)
    found.add("prefill", **PREFILL_NODE)
    found.add("decode", **DECODE_NODE)
    ray.init(address=found.ray_cluster.address, namespace="placement", log_to_driver=False, logging_level="error")
    try:
        yield found
    finally:
        ray.shutdown()
        found.ray_cluster.shutdown()


@dataclass
class Listener:
    """What the pools tell."""

    workers: dict[str, WorkerInfo] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)

    async def worker_ready(self, info: WorkerInfo, *, is_outdated: bool = False) -> None:
        self.workers[info.worker_id] = info

    async def worker_gone(self, worker_id: str) -> None: ...

    async def drain(self, worker_id: str, timeout_s: float) -> None: ...

    def report(self, text: str) -> None:
        self.reports.append(text)


@dataclass(frozen=True)
class Placed:
    """Where a worker runs, and which GPUs it was granted and can see."""

    node: str
    gpus: list[str]
    visible: str


class Placing:
    """Both pools of a configuration, with actors that only say where they are."""

    def __init__(self, nodes: Nodes, config: BatonConfig) -> None:
        self.listener = Listener()
        self.config = config
        self.pools = {name: WorkerPool(name, config, self.listener, PlacedHost, None, SECRET) for name in POOLS}
        self._nodes = nodes

    def scale(self) -> None:
        for name, pool in self.pools.items():
            pool.scale(self.config.pool(name).workers)

    async def wait(self, timeout_s: float = READY_S) -> None:
        for pool in self.pools.values():
            await pool.wait_until_ready(timeout_s)

    async def error_of_waiting(self, pool: str, num_ready: int) -> DeadlineError:
        """What the user reads about those of ``pool`` that do not come up, once ``num_ready`` others have."""
        waiting = self.pools[pool]
        async with asyncio.timeout(READY_S):
            while waiting.num_ready < num_ready:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        with pytest.raises(DeadlineError) as raised:
            await waiting.wait_until_ready(PENDING_S)
        return raised.value

    def placed(self, pool: str) -> list[Placed]:
        found = []
        for info in self.listener.workers.values():
            if info.pool == pool:
                node_id, gpus, visible = placement_of(info.device)
                found.append(Placed(self._nodes.names[node_id], gpus, visible))
        return found


@contextlib.asynccontextmanager
async def placing(nodes: Nodes, config: BatonConfig | dict[str, Any]) -> AsyncIterator[Placing]:
    checked = config if isinstance(config, BatonConfig) else BatonConfig.from_dict(config)
    pools = Placing(nodes, checked)
    pools.scale()
    try:
        yield pools
    finally:
        await asyncio.gather(*(pool.stop() for pool in pools.pools.values()))
        await _everything_free(nodes)


async def _everything_free(nodes: Nodes) -> None:
    async with asyncio.timeout(READY_S):
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def placement_config(pool: str, workers: int = 1, **resources: Any) -> dict[str, Any]:
    """One pool with wishes; the other one is easily served."""
    return {pool: {"workers": workers, "resources": resources}}


def nodes_of(placed: list[Placed]) -> set[str]:
    return {worker.node for worker in placed}


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"accelerator_type": "H100"}, {"prefill"}),
        pytest.param(
            {"accelerator_type": "H200"},
            {"decode"},
            marks=pytest.mark.thorough(covered_by="test_each_pool_lands_on_its_own_kind_of_node"),
        ),
        pytest.param(
            {"accelerator_type": "H100", "gpus": 1},
            {"prefill"},
            marks=pytest.mark.thorough(covered_by="test_each_pool_lands_on_its_own_kind_of_node"),
        ),
        pytest.param(
            {"labels": {"tier": "memory"}}, {"decode"}, marks=pytest.mark.thorough(covered_by="['rack': '7']")
        ),
        ({"labels": {"rack": "7"}, "accelerator_type": "H200"}, {"decode"}),
        ({"labels": {ACCELERATOR_LABEL: "!H100"}, "gpus": 1}, {"decode"}),
        pytest.param(
            {"labels": {ACCELERATOR_LABEL: "in(H100, A100)"}},
            {"prefill"},
            marks=pytest.mark.thorough(covered_by="[!H100]"),
        ),
        ({"cpus": 5}, {"prefill", "decode"}),
        pytest.param(
            {"memory_gib": 100},
            {"prefill", "decode"},
            marks=pytest.mark.thorough(covered_by="test_memory_is_reserved_for_each_worker"),
        ),
        pytest.param(
            {"gpus": 0.5},
            {"prefill", "decode"},
            marks=pytest.mark.thorough(covered_by="test_two_workers_can_share_a_gpu"),
        ),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
async def test_every_placement_setting_is_applied(nodes, resources, expected):
    async with placing(nodes, placement_config("decode", 2, **resources)) as pools:
        await pools.wait()
        placed = pools.placed("decode")
        assert len(placed) == 2
        assert nodes_of(placed) <= expected
        wanted = resources.get("gpus", 0)
        assert all(len(worker.gpus) == (1 if wanted else 0) for worker in placed)


async def test_each_pool_lands_on_its_own_kind_of_node(nodes):
    config = placement_config("prefill", 2, gpus=1, accelerator_type="H100") | placement_config(
        "decode", 2, gpus=1, accelerator_type="H200"
    )
    async with placing(nodes, config) as pools:
        await pools.wait()
        assert [worker.node for worker in pools.placed("prefill")] == ["prefill"] * 2
        assert [worker.node for worker in pools.placed("decode")] == ["decode"] * 2


async def test_every_worker_sees_only_its_own_gpu(nodes):
    async with placing(nodes, placement_config("decode", 2, gpus=1, accelerator_type="H200")) as pools:
        await pools.wait()
        placed = pools.placed("decode")
        assert sorted(gpu for worker in placed for gpu in worker.gpus) == ["0", "1"]
        assert all([worker.visible] == worker.gpus for worker in placed)


async def test_a_worker_without_a_gpu_sees_none(nodes):
    async with placing(nodes, placement_config("decode", gpus=0, accelerator_type="H200")) as pools:
        await pools.wait()
        assert pools.placed("decode") == [Placed("decode", [], "")]


async def test_two_workers_can_share_a_gpu(nodes):
    async with placing(nodes, placement_config("decode", 4, gpus=0.5, accelerator_type="H200")) as pools:
        await pools.wait()
        granted = [gpu for worker in pools.placed("decode") for gpu in worker.gpus]
        assert sorted(granted) == ["0", "0", "1", "1"]


async def test_memory_is_reserved_for_each_worker(nodes):
    async with placing(nodes, placement_config("decode", 3, memory_gib=100, accelerator_type="H200")) as pools:
        assert "2 of 3 decode workers are ready" in (await pools.error_of_waiting("decode", 2)).message


@pytest.mark.parametrize(
    ("resources", "texts"),
    [
        (
            {"accelerator_type": "B200", "gpus": 1},
            ["label ray.io/accelerator-type=B200", "label ray.io/accelerator-type is H100", "No node is large enough"],
        ),
        ({"labels": {"rack": "9"}}, ["label rack is 7", "no label rack", "change decode.resources"]),
        ({"cpus": 64}, ["needs 64 CPUs", "too few CPUs", "No node is large enough"]),
        ({"memory_gib": 1000}, ["1000 GiB of memory", "too little memory", "2 GPUs (H200), 256.0 GiB"]),
        (
            {"accelerator_type": "H200", "labels": {"tier": "compute"}},
            ["label tier is memory", "label ray.io/accelerator-type is H100", "No node is large enough"],
        ),
    ],
    ids=["accelerator", "label", "cpus", "memory", "labels_of_two_nodes"],
)
async def test_the_error_explains_why_no_node_fits(nodes, resources, texts):
    async with placing(nodes, placement_config("decode", **resources)) as pools:
        with pytest.raises(DeadlineError) as raised:
            await pools.pools["decode"].wait_until_ready(PENDING_S)
        assert f"After {PENDING_S:g} s, 0 of 1 decode workers are ready. A decode worker needs" in str(raised.value)
        for text in texts:
            assert text in raised.value.message


async def test_the_error_explains_that_all_fitting_nodes_are_full(nodes):
    async with placing(nodes, placement_config("decode", 3, gpus=1, accelerator_type="H200")) as pools:
        message = (await pools.error_of_waiting("decode", 2)).message
        assert "2 of 3 decode workers are ready" in message
        assert "2 GPUs (H200), 256.0 GiB: large enough, but in use" in message
        assert "free resources, add nodes, or lower decode.workers." in message


async def test_a_waiting_worker_is_placed_when_a_node_joins(nodes):
    async with placing(nodes, placement_config("decode", 1, gpus=1, accelerator_type="B200")) as pools:
        with pytest.raises(DeadlineError, match="No node is large enough"):
            await pools.pools["decode"].wait_until_ready(PENDING_S)
        joined = nodes.add("new", num_cpus=2, num_gpus=1, labels={ACCELERATOR_LABEL: "B200"})
        try:
            await pools.wait()
            assert pools.placed("decode") == [Placed("new", ["0"], "0")]
            [worker] = pools.pools["decode"].status()["workers"]
            assert (worker["state"], worker["reason"]) == ("ready", "")
        finally:
            for pool in pools.pools.values():
                await pool.stop()
            nodes.ray_cluster.remove_node(joined)


async def test_workers_of_a_lost_node_wait_for_another_node(nodes):
    doomed = nodes.add("doomed", num_cpus=2, labels={"spot": "yes"})
    async with placing(nodes, placement_config("decode", labels={"spot": "yes"})) as pools:
        await pools.wait()
        assert nodes_of(pools.placed("decode")) == {"doomed"}
        nodes.ray_cluster.remove_node(doomed, allow_graceful=False)
        spare = nodes.add("spare", num_cpus=2, labels={"spot": "yes"})
        try:
            async with asyncio.timeout(READY_S):
                while "spare" not in nodes_of(pools.placed("decode")):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        finally:
            for pool in pools.pools.values():
                await pool.stop()
            nodes.ray_cluster.remove_node(spare)


@pytest.mark.thorough(covered_by="tests/unit/test_packaging.py::test_the_example_machines_satisfy_the_gpu_example")
async def test_the_gpu_example_fits_the_example_machines(nodes):
    """deploy/gpu-cluster.yaml on the node types of deploy/ray-cluster.yaml."""
    config = load_config(DEPLOY / "gpu-cluster.yaml")
    types = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())["available_node_types"]
    joined = [
        nodes.add(
            f"example {pool}",
            num_cpus=types[pool]["resources"]["CPU"],
            num_gpus=types[pool]["resources"]["GPU"],
            labels=types[pool]["labels"],
            memory=1024 * GIB,
        )
        for pool in POOLS
    ]
    try:
        async with placing(nodes, config) as pools:
            await pools.wait()
            for pool in POOLS:
                placed = pools.placed(pool)
                assert [worker.node for worker in placed] == [f"example {pool}"] * config.pool(pool).workers
                granted = [gpu for worker in placed for gpu in worker.gpus]
                wanted = config.pool(pool).workers * config.pool(pool).resources.gpus
                assert len(granted) == len(set(granted)) == wanted
    finally:
        for node in joined:
            nodes.ray_cluster.remove_node(node)


def test_start_fails_with_the_reason_when_no_node_fits(nodes, tmp_path):
    """All of what `baton up` runs, real workers included: they never get as far as loading the model."""
    nowhere = {"resources": {"gpus": 1, "accelerator_type": "TPU-V9"}}
    config = BatonConfig.from_dict(
        {
            "model": str(write_model_folder(tmp_path)),
            "router": {"port": 0},
            "ray": {"address": "auto", "namespace": "placement", "start_timeout_s": 12.0},
            "prefill": nowhere,
            "decode": nowhere,
        }
    )
    reports: list[str] = []
    with pytest.raises(DeadlineError) as raised:
        Cluster.start(config, reports.append)
    message = raised.value.message
    assert "After 12 s, 0 of 1 " in message
    assert " needs 1 CPUs, 1 GPUs, " in message
    assert "the node label ray.io/accelerator-type=TPU-V9, and Ray has not started it yet" in message
    assert "4 GPUs (H100), 256.0 GiB: label ray.io/accelerator-type is H100" in message
    # While it waits it says so, for both pools.
    assert {pool for pool in POOLS for line in reports if line.startswith(f"A {pool} worker needs")} == set(POOLS)
    assert ray.available_resources()["GPU"] == ray.cluster_resources()["GPU"]
