"""What a Ray cluster's head answers before this machine belongs to the cluster."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import grpc
import ray
from ray.core.generated import (
    autoscaler_pb2,
    autoscaler_pb2_grpc,
    gcs_pb2,
    gcs_service_pb2,
    gcs_service_pb2_grpc,
)

from baton.core.errors import ConfigError, WorkerLostError

_MESSAGES: Any = gcs_service_pb2  # protobuf makes its classes at run time
_DRAIN_MESSAGES: Any = autoscaler_pb2
_TIMEOUT_S = 10.0
_RAY_NAMESPACE, _RAY_METADATA = b"cluster", b"CLUSTER_METADATA"
_BATON_NAMESPACE, _BATON_VERSION, _BATON_END = b"baton", b"version", b"end"


@dataclass(frozen=True, slots=True)
class HeadNodes:
    """The live nodes of a cluster.

    Attributes:
        head_id: id of the head's node, in hexadecimal; empty while it is not there.
        others: address of each other node, by id.
    """

    head_id: str
    others: Mapping[str, str]

    def at(self, addresses: Collection[str]) -> set[str]:
        """Ids of the nodes at these addresses, without the head's."""
        return {node_id for node_id, address in self.others.items() if address in addresses}


class RayHead:
    """Calls Ray's global control store (GCS) without connecting this process to the cluster.

    Args:
        address: ``host:port``.
        token: see :mod:`cluster.nodes.ray_token`; ``None`` sends none.
    """

    def __init__(self, address: str, token: str | None) -> None:
        self.address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def is_reachable(self) -> bool:
        """Whether it answers and accepts the token."""
        try:
            self.check()
        except (ConfigError, WorkerLostError):
            return False
        return True

    def asks_for_token(self) -> bool:
        """Whether it refuses callers without a token.

        Raises:
            WorkerLostError: it does not answer.
        """
        try:
            RayHead(self.address, None).check()
        except ConfigError:
            return True
        return False

    def check(self) -> None:
        """Makes sure that it answers.

        Raises:
            WorkerLostError: it does not answer.
            ConfigError: it refuses the token.
        """
        self._call("NodeInfoGcsServiceStub", "CheckAlive", _MESSAGES.CheckAliveRequest())

    def versions(self) -> dict[str, str]:
        """Versions of the programs on the head that are known, by name.

        Raises:
            WorkerLostError: it does not answer.
            ConfigError: it refuses the token.
        """
        found = json.loads(self._read(_RAY_NAMESPACE, _RAY_METADATA) or b"{}")
        versions = {"Python": found.get("python_version"), "Ray": found.get("ray_version")}
        versions["baton"] = self._read(_BATON_NAMESPACE, _BATON_VERSION).decode()
        return {name: version for name, version in versions.items() if version}

    def has_node(self, address: str, port: int) -> bool:
        """Whether a live node has its node manager at this address; False also if the head does not answer."""
        try:
            found = self._live_nodes()
        except WorkerLostError:
            return False
        return any((node.node_manager_address, node.node_manager_port) == (address, port) for node in found)

    def nodes(self) -> HeadNodes:
        """The live nodes.

        Raises:
            WorkerLostError: it does not answer.
            ConfigError: it refuses the token.
        """
        found = self._live_nodes()
        heads = [node.node_id.hex() for node in found if node.is_head_node]
        others = {node.node_id.hex(): node.node_manager_address for node in found if not node.is_head_node}
        return HeadNodes(heads[0] if heads else "", others)

    def drain(self, node_id: str, timeout_s: float) -> None:
        """Declares that a node will end within ``timeout_s``, as the end of ``baton node join`` does.

        Ray places nothing there any more, and ends the node once its actors are gone.

        Args:
            node_id: in hexadecimal.

        Raises:
            WorkerLostError: it does not answer, or refuses.
            ConfigError: it refuses the token.
        """
        request = _DRAIN_MESSAGES.DrainNodeRequest(
            node_id=bytes.fromhex(node_id),
            reason=_DRAIN_MESSAGES.DRAIN_NODE_REASON_PREEMPTION,  # the only one that Ray never refuses
            reason_message="the node is about to end",
            deadline_timestamp_ms=int((time.time() + timeout_s) * 1e3),
        )
        reply = self._call("AutoscalerStateServiceStub", "DrainNode", request, autoscaler_pb2_grpc)
        if not reply.is_accepted:
            raise WorkerLostError(f"Ray does not drain the node {node_id}: {reply.rejection_reason_message}")

    def announce_end(self) -> None:
        """Lets nodes know that the whole cluster is about to end.

        The announcement is of this run of the head: it does not hold for the next one, even if Ray's control store
        keeps it.

        Raises:
            WorkerLostError: it does not answer.
            ConfigError: it refuses the token.
        """
        self._write(_BATON_END, self.nodes().head_id.encode())

    def is_ending(self) -> bool:
        """Whether the end of the whole cluster is announced.

        Raises:
            WorkerLostError: it does not answer.
            ConfigError: it refuses the token.
        """
        announced = self._read(_BATON_NAMESPACE, _BATON_END).decode()
        return bool(announced) and announced == self.nodes().head_id

    def publish_baton(self) -> None:
        """Lets nodes that join compare their version of baton with this process's."""
        self._write(_BATON_VERSION, own_versions()["baton"].encode())

    def _live_nodes(self) -> list[Any]:
        nodes = self._call("NodeInfoGcsServiceStub", "GetAllNodeInfo", gcs_service_pb2.GetAllNodeInfoRequest())
        return [node for node in nodes.node_info_list if node.state == gcs_pb2.GcsNodeInfo.ALIVE]

    def _write(self, key: bytes, value: bytes) -> None:
        request = _MESSAGES.InternalKVPutRequest(namespace=_BATON_NAMESPACE, key=key, value=value, overwrite=True)
        self._call("InternalKVGcsServiceStub", "InternalKVPut", request)

    def _read(self, namespace: bytes, key: bytes) -> bytes:
        request = _MESSAGES.InternalKVGetRequest(namespace=namespace, key=key)
        return bytes(self._call("InternalKVGcsServiceStub", "InternalKVGet", request).value)

    def _call(self, service: str, method: str, request: Any, stubs: Any = gcs_service_pb2_grpc) -> Any:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.address, options=options) as channel:
            stub = getattr(stubs, service)(channel)
            try:
                return getattr(stub, method)(request, metadata=self._metadata, timeout=_TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    raise ConfigError(
                        f"The Ray cluster at {self.address} refuses this machine's token. Copy the token that "
                        "`baton node token` prints on the head."
                    ) from error
                raise WorkerLostError(
                    f"No Ray head answers at {self.address} ({error.code().name}: {error.details()}). Start it with "
                    "`baton node start`, and open its port in the firewall."
                ) from error


def own_versions() -> dict[str, str]:
    """Versions of this machine that must be those of the head."""
    return {"Python": platform.python_version(), "Ray": ray.__version__, "baton": metadata.version("baton-serve")}


def check_versions(head: RayHead) -> None:
    """Compares this machine with the head.

    Raises:
        ConfigError: a version differs; the message says what to install.
        WorkerLostError: the head does not answer.
    """
    own = own_versions()
    wrong = [
        f"{name} {own[name]} is here, and {name} {version} on the head"
        for name, version in head.versions().items()
        if own[name] != version
    ]
    if wrong:
        raise ConfigError(
            f"This machine cannot join the cluster at {head.address}: {'; '.join(wrong)}. Workers exchange Python "
            "objects, so install the head's versions here: the same Python, and baton with the same constraints.txt."
        )
