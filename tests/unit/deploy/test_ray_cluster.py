"""The machines of ``deploy/ray-cluster.yaml``, beside what ``tests/unit/test_packaging.py`` compares with baton."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Template
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.deploy.deploy_files import DEPLOY, ROOT

TEXT = (DEPLOY / "ray-cluster.yaml").read_text(encoding="utf-8")
SETTINGS = "\n".join(line.split("#")[0] for line in TEXT.splitlines())
VARIABLES = {name: f"value-of-{name}" for name in re.findall(r"\$\{(\w+)\}", SETTINGS)}
POOLS = ("prefill", "decode")


def cluster() -> dict[str, Any]:
    return yaml.safe_load(Template(TEXT).safe_substitute(VARIABLES))


def problem(machines: dict[str, Any]) -> str | None:
    """What Ray says against the machines, before it asks AWS."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(machines))
    except (KeyError, ValueError, jsonschema.ValidationError) as error:
        return repr(error)
    return None


def test_ray_accepts_the_machines():
    assert problem(cluster()) is None


PLANTED: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown key": lambda it: it.update(max_worker=2),
    "text for a number": lambda it: it.update(max_workers="two"),
    "no provider": lambda it: it.pop("provider"),
    "no such head": lambda it: it.update(head_node_type="router"),
    "unknown key of a type": lambda it: it["available_node_types"]["prefill"].update(min_worker=1),
    "no resources": lambda it: it["available_node_types"]["decode"].pop("resources"),
    "more than all": lambda it: it.update(max_workers=1),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error):
    machines = cluster()
    PLANTED[error](machines)
    assert problem(machines)


def test_the_documented_steps_set_every_variable():
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    listed = re.findall(r"\$(\w+)", re.findall(r"envsubst '(.*)'", page)[0])
    assert sorted(listed) == sorted(VARIABLES)
    exported = re.findall(r"(\w+)=", " ".join(re.findall(r"^export (.*)$", page, re.MULTILINE)))
    assert set(listed) <= set(exported)


@pytest.mark.parametrize("pool", POOLS)
def test_every_gpu_has_a_fabric_adapter(pool):
    node = cluster()["available_node_types"][pool]
    interfaces = node["node_config"]["NetworkInterfaces"]
    assert all(interface["SubnetId"] and interface["Groups"] for interface in interfaces)  # Ray requires both
    places = {(interface["NetworkCardIndex"], interface["DeviceIndex"]) for interface in interfaces}
    assert len(places) == len(interfaces)
    adapters = [interface for interface in interfaces if interface.get("InterfaceType") == "efa-only"]
    assert len(adapters) == node["resources"]["GPU"]
    assert interfaces[0].keys().isdisjoint({"InterfaceType"}), "the first interface carries IP"


def test_ids_of_an_account_are_variables():
    assert not re.findall(r"\b(?:ami|subnet|sg|vpc|cr)-[0-9a-f]+", TEXT)


def test_the_token_of_ray_reaches_every_node_before_ray_starts():
    machines = cluster()
    assert machines["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("RAY_AUTH_MODE=token" in command for command in machines["setup_commands"])


def test_there_is_room_to_grow():
    types = cluster()["available_node_types"]
    assert all(types[pool]["max_workers"] > types[pool]["min_workers"] for pool in POOLS)
