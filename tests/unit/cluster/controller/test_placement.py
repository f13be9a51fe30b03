"""Placement requests of pools, and the explanation when no node fits; without Ray."""

from __future__ import annotations

import pytest

from cluster.config.config import BatonConfig
from cluster.config.worker_config import ResourcesConfig
from cluster.controller.placement import (
    Node,
    actor_options,
    describe_request,
    explain_pending,
    fits_somewhere,
    live_nodes,
    pool_resources,
)
from cluster.nodes.node_labels import NodePool

GIB = 2**30
H100 = Node("10.0.0.1", {"CPU": 16.0, "GPU": 8.0, "memory": 64.0 * GIB}, {"ray.io/accelerator-type": "H100"})
CPU_ONLY = Node("10.0.0.2", {"CPU": 4.0, "memory": 8.0 * GIB}, {})


VARIABLES = {
    "GOMP_SPINCOUNT": "1000",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "2147483648",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
RUNTIME_ENV = {"env_vars": VARIABLES}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (*VARIABLES, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_the_defaults_request_one_cpu_and_nothing_else():
    assert actor_options(ResourcesConfig()) == {"num_cpus": 1.0, "num_gpus": 0.0, "runtime_env": RUNTIME_ENV}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_set_by_the_user_are_passed_on(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    assert actor_options(ResourcesConfig())["runtime_env"] == {"env_vars": VARIABLES | {name: "7"}}


def test_inherited_variables_are_not_requested(monkeypatch):
    """Or actors would wait until Ray can make environments."""
    assert actor_options(ResourcesConfig(), is_local=True)["runtime_env"] == RUNTIME_ENV
    for name in VARIABLES:
        monkeypatch.setenv(name, "7")
    assert "runtime_env" not in actor_options(ResourcesConfig(), is_local=True)
    assert "runtime_env" in actor_options(ResourcesConfig())  # other nodes have an environment of their own


def test_every_placement_setting_becomes_an_option():
    resources = ResourcesConfig(
        cpus=4.0, gpus=1.0, memory_gib=1.5, accelerator_type="H100", labels={"baton-pool": "prefill"}
    )
    assert actor_options(resources) == {
        "num_cpus": 4.0,
        "num_gpus": 1.0,
        "memory": 3 * GIB // 2,
        "label_selector": {"ray.io/accelerator-type": "H100", "baton-pool": "prefill"},
        "runtime_env": RUNTIME_ENV,
    }
    assert describe_request(resources) == (
        "4 CPUs, 1 GPUs, 1.5 GiB of memory, the node label baton-pool=prefill, "
        "the node label ray.io/accelerator-type=H100"
    )


@pytest.mark.parametrize(
    ("wanted", "lacks"),
    [
        ({"gpus": 1.0}, "too few GPUs"),
        ({"cpus": 5.0}, "too few CPUs"),
        ({"memory_gib": 9.0}, "too little memory"),
        ({"accelerator_type": "H100"}, "no label ray.io/accelerator-type"),
        ({"labels": {"rack": "7"}}, "no label rack"),
    ],
)
def test_a_node_that_does_not_fit_is_explained(wanted, lacks):
    text = explain_pending("decode", ResourcesConfig(**wanted), [CPU_ONLY])
    assert f"10.0.0.2: 4 CPUs, 0 GPUs, 8.0 GiB: {lacks}" in text
    assert "No node is large enough: change decode.resources" in text
    assert "Where Ray's autoscaler adds nodes" in text


def test_a_wrong_label_is_shown_with_the_labels_of_the_node():
    text = explain_pending("decode", ResourcesConfig(accelerator_type="H200"), [H100])
    assert "10.0.0.1: 16 CPUs, 8 GPUs (H100), 64.0 GiB: label ray.io/accelerator-type is H100" in text


def test_on_a_local_cluster_the_number_of_cpus_is_a_setting():
    busy = explain_pending("prefill", ResourcesConfig(), [CPU_ONLY], is_local=True)
    assert "If the start is not merely slow, free resources, raise ray.num_cpus, or lower prefill.workers." in busy
    slow = explain_pending("prefill", ResourcesConfig(), [CPU_ONLY], is_local=True, num_free_cpus=1.0)
    assert (
        slow
        == "There is room for a prefill worker, but its process is slow to start: the machine is busy, or Ray hangs."
    )
    too_large = explain_pending("prefill", ResourcesConfig(cpus=5.0), [CPU_ONLY], is_local=True, num_free_cpus=9.0)
    assert "change prefill.resources, or raise ray.num_cpus." in too_large
    assert "autoscaler" not in busy + too_large
    for other in ({"gpus": 1.0}, {"memory_gib": 9.0}, {"cpus": 5.0, "labels": {"rack": "7"}}):
        assert "num_cpus" not in explain_pending("prefill", ResourcesConfig(**other), [H100, CPU_ONLY], is_local=True)


def test_a_busy_node_is_distinguished_from_one_that_never_fits():
    text = explain_pending("prefill", ResourcesConfig(gpus=1.0), [H100, CPU_ONLY])
    assert "10.0.0.1: 16 CPUs, 8 GPUs (H100), 64.0 GiB: large enough, but in use" in text
    assert "10.0.0.2: 4 CPUs, 0 GPUs, 8.0 GiB: too few GPUs" in text
    assert "lower prefill.workers" in text


@pytest.mark.parametrize(
    ("selector", "fits"),
    [("H100", True), ("!H100", False), ("!H200", True), ("in(H100, H200)", True), ("!in(H100, H200)", False)],
)
def test_label_operators_are_understood(selector, fits):
    text = explain_pending("decode", ResourcesConfig(labels={"ray.io/accelerator-type": selector}), [H100])
    assert ("large enough, but in use" in text) is fits


def test_dead_nodes_are_left_out():
    nodes = [
        {"NodeManagerAddress": "a", "Alive": True, "Resources": {"CPU": 2.0}, "Labels": {"x": "1"}},
        {"NodeManagerAddress": "b", "Alive": False, "Resources": {"CPU": 2.0}},
    ]
    assert live_nodes(nodes) == [Node("a", {"CPU": 2.0}, {"x": "1"})]


@pytest.mark.parametrize(
    ("reserved_for", "pools"),
    [
        (NodePool.PREFILL, ["prefill"]),
        (NodePool.DECODE, ["decode"]),
        (NodePool.ANY, ["prefill", "decode"]),
        (NodePool.NONE, []),
    ],
)
def test_nodes_run_the_workers_that_they_are_reserved_for(reserved_for, pools):
    config = BatonConfig.from_dict({"ray": {"address": "auto"}})
    node = Node("10.0.0.3", {"CPU": 4.0, "memory": 8.0 * GIB}, reserved_for.labels)
    assert [pool for pool in ("prefill", "decode") if fits_somewhere(pool_resources(config, pool), [node])] == pools


def test_a_label_of_the_user_selects_nodes_alone():
    labels = {"baton-pool": "in(mine, yours)"}
    config = BatonConfig.from_dict({"ray": {"address": "auto"}, "prefill": {"resources": {"labels": labels}}})
    assert pool_resources(config, "prefill").labels == labels
    assert pool_resources(BatonConfig(), "decode").labels == {}  # a local cluster has one node
    assert "no node label baton-pool in(prefill,none)" in describe_request(pool_resources(config, "decode"))
