"""A Ray cluster on one host whose autoscaler adds nodes while workers wait for a place, and removes idle ones.

The nodes are those of Ray's fake cloud: each is a raylet on the head's host, with resources and labels that are
pretended.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)

from baton.core.roles import POOLS
from baton.process.worker_environment import LOCAL_RAY_VARIABLES
from cluster.nodes.node_labels import POOL_LABEL
from cluster.nodes.ray_head import RayHead
from cluster.nodes.ray_token import MODE_VARIABLE
from tests.namespaces import OWN_ADDRESS
from tests.separate_nodes import RAY_PORT, SeparateNodes

IDLE_S = 1.0
"""A node on which nothing has run for so long is removed."""
_OBJECT_STORE_BYTES = 80 * 2**20
_EMPTY_LISTS = (
    "cluster_synced_files",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "initialization_commands",
)
_VARIABLES = {
    **LOCAL_RAY_VARIABLES,
    MODE_VARIABLE: "token",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    # What Ray's own AutoscalingCluster sets for this provider and version 2 of the autoscaler.
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
}


@dataclass
class FakeCloud(SeparateNodes):
    """A head without room for workers, and a cloud that may have a node for each pool.

    Attributes:
        folder: of Ray's files, with a short path.
    """

    folder: Path = Path()

    def start_head(self) -> None:
        """Starts Ray's head with its autoscaler; the cloud has no nodes yet."""
        self.offer(0)
        (self.logs / "token").write_text(secrets.token_hex(32))
        # Ray's nodes take the address that faces the internet.
        self.head.run(["ip", "route", "add", "default", "via", OWN_ADDRESS], 10)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += ["--include-dashboard=false", f"--node-ip-address={self.head.address}", f"--port={RAY_PORT}"]
        command += [f"--temp-dir={self.folder}", "--num-cpus=0", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
        command += [f"--autoscaling-config={self._offer_file}"]
        self.head.start(command, self.log_of(self.head, "ray"), self.variables | _VARIABLES)
        head = RayHead(f"{self.head.address}:{RAY_PORT}", (self.logs / "token").read_text())
        self.wait_for(head.is_reachable, "the head")

    def offer(self, num_nodes: int) -> None:
        """Sets how many nodes for each pool the cloud has."""
        types = {pool: _node_type(num_nodes, {"CPU": 1}, {POOL_LABEL: pool}) for pool in POOLS}
        config = {
            "cluster_name": "fake",
            "max_workers": len(POOLS),
            "idle_timeout_minutes": IDLE_S / 60,
            "provider": {
                "type": "external",
                "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__qualname__}",
                "gcs_address": f"{self.head.address}:{RAY_PORT}",
                "head_node_id": FAKE_HEAD_NODE_ID,
                "launch_multiple": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": {FAKE_HEAD_NODE_TYPE: _node_type(0, {"CPU": 0}, {}), **types},
            "head_node_type": FAKE_HEAD_NODE_TYPE,
            "file_mounts": {},
            "auth": {},
            **{name: [] for name in _EMPTY_LISTS},
        }
        complete = self._offer_file.with_suffix(".new")  # the autoscaler reads the file every second
        complete.write_text(json.dumps(config))
        complete.replace(self._offer_file)

    @property
    def num_nodes(self) -> int:
        """How many nodes there are beside the head."""
        return sum(_name(pid) == "raylet" for pid in self.head.pids()) - 1

    @property
    def _offer_file(self) -> Path:
        return self.logs / "offer.json"


def _node_type(num_nodes: int, resources: Mapping[str, float], labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "min_workers": 0,
        "max_workers": num_nodes,
        "resources": {**resources, "object_store_memory": _OBJECT_STORE_BYTES},
        "labels": dict(labels),
        "node_config": {},
    }


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return ""
