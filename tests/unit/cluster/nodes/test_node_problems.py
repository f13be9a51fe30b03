"""What is wrong with the machines of a cluster, and the remedies."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.nodes.node_facts import NodeFacts, gather_facts
from cluster.nodes.node_problems import (
    Problem,
    clock_problems,
    gpu_problems,
    machine_problems,
    model_problems,
    version_problems,
)

GOOD = NodeFacts(
    hostname="n1",
    python="3.11.9",
    ray="2.60.0",
    baton="0.1.0",
    torch="2.13.0",
    cuda="12.8",
    driver="570.86.15",
    gpus=("H100",),
    shm_bytes=2**34,
    shm_free_bytes=2**33,
    max_files=65_536,
    max_locked_bytes=-1,
    rdma=("mlx5_0",),
    has_model=True,
)


def changed(**values: object) -> dict[str, NodeFacts]:
    return {"n1": dataclasses.replace(GOOD, **values)}  # type: ignore[arg-type]


def only(problems: object) -> Problem:
    [problem] = list(problems)  # type: ignore[call-overload]
    return problem


def test_a_good_machine_has_no_problem() -> None:
    nodes = {"n1": GOOD}
    assert not list(version_problems(GOOD, nodes))
    assert not list(gpu_problems(nodes))
    assert not list(machine_problems(nodes, uses_rdma=True))
    assert not list(clock_problems({"n1": 0.02}))
    assert not list(model_problems("some/model", nodes, is_folder=True))


@pytest.mark.parametrize(("name", "is_fatal"), [("python", True), ("ray", True), ("baton", True), ("torch", False)])
def test_versions_must_be_those_of_the_head(name: str, is_fatal: bool) -> None:
    problem = only(version_problems(GOOD, changed(**{name: "1.2.3"})))
    assert problem.is_fatal == is_fatal
    assert problem.text.startswith("n1: ")
    assert f"1.2.3 is installed, but {getattr(GOOD, name)} on the head. Install the same" in problem.text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"driver": ""}, "no NVIDIA driver answers"),
        ({"cuda": ""}, "torch 2.13.0 is built without CUDA"),
        ({"driver": "470.57.02"}, "driver 470.57.02 is too old for torch's CUDA 12.8. Install 525.60 or newer"),
        ({"driver": "550.54.15", "cuda": "13.0"}, "Install 580.65 or newer"),
    ],
)
def test_gpus_that_torch_cannot_use(values: dict[str, str], text: str) -> None:
    problem = only(gpu_problems(changed(**values)))
    assert problem.is_fatal
    assert text in problem.text


@pytest.mark.parametrize(
    ("values", "text", "is_fatal"),
    [
        ({"shm_free_bytes": 2**26, "shm_bytes": 2**26}, "64 MiB of 64 MiB of /dev/shm are free", False),
        ({"shm_free_bytes": 0}, "--shm-size=16g", True),
        ({"max_files": 1024}, "LimitNOFILE=", False),
        ({"rdma": ()}, "NIXL uses TCP", False),
        ({"max_locked_bytes": 2**23}, "lock only 8 MiB", False),
    ],
)
def test_limits_and_devices(values: dict[str, object], text: str, is_fatal: bool) -> None:
    problem = only(machine_problems(changed(**values), uses_rdma=True))
    assert text in problem.text
    assert problem.is_fatal == is_fatal


def test_rdma_is_asked_for_only_where_it_is_used() -> None:
    assert not list(machine_problems(changed(rdma=(), max_locked_bytes=0), uses_rdma=False))


def test_clocks_and_models() -> None:
    assert "its clock is 2.5 s behind the head's" in only(clock_problems({"n1": -2.5, "n2": 0.5})).text
    missing = changed(has_model=False)
    assert only(model_problems("/models/big", missing, is_folder=True)).is_fatal
    assert not only(model_problems("some/model", missing, is_folder=False)).is_fatal
    assert not list(model_problems("some/model", changed(has_model=None), is_folder=False))


def test_facts_of_this_machine_survive_the_way_to_the_head() -> None:
    facts = gather_facts("./no/such/model")
    assert NodeFacts.from_dict(facts.to_dict()) == facts
    assert not facts.has_model
    assert facts.python.startswith("3.")
    assert facts.max_files
