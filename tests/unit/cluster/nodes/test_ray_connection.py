"""The token and the folder of the Ray that baton connects to or starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from baton.core.errors import ConfigError, WorkerLostError
from baton.process.worker_environment import worker_variables
from cluster.config.config import BatonConfig
from cluster.nodes import ray_connection, ray_head
from cluster.nodes.ray_connection import connect
from cluster.nodes.ray_head import RayHead, check_versions, own_versions

TOKEN = "0123456789abcdef"


class FakeGcs(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer, gcs_service_pb2_grpc.InternalKVGcsServiceServicer):
    """The part of a head that answers before a node joins."""

    def __init__(self) -> None:
        self.token: str | None = TOKEN
        self.values: dict[bytes, bytes] = {}

    def CheckAlive(self, request: Any, context: Any) -> Any:
        self._authenticate(context)
        return gcs_service_pb2.CheckAliveReply()

    def InternalKVGet(self, request: Any, context: Any) -> Any:
        self._authenticate(context)
        return gcs_service_pb2.InternalKVGetReply(value=self.values.get(request.key, b""))

    def InternalKVPut(self, request: Any, context: Any) -> Any:
        self._authenticate(context)
        self.values[request.key] = request.value
        return gcs_service_pb2.InternalKVPutReply()

    def _authenticate(self, context: Any) -> None:
        if self.token and ("authorization", f"Bearer {self.token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")


@pytest.fixture
def gcs() -> Iterator[tuple[str, FakeGcs]]:
    fake = FakeGcs()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(fake, server)
    gcs_service_pb2_grpc.add_InternalKVGcsServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", fake
    server.stop(0)


@pytest.fixture
def inits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each ``ray.init``, which does nothing. The environment is this test's own."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")})
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    return calls


def test_a_local_ray_is_private(inits: list[dict[str, Any]], tmp_path: Path) -> None:
    connection = connect(BatonConfig(), lambda line: None)
    assert connection is not None
    [options] = inits
    assert Path(options["_temp_dir"]).parent.stat().st_mode & 0o777 == 0o700
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    connection.close()


def test_a_local_ray_without_authentication_is_refused(inits: list[dict[str, Any]]) -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE"):
        connect(BatonConfig(), lambda line: None)
    assert inits == []


def test_the_token_is_used_where_the_head_asks_for_it(
    gcs: tuple[str, FakeGcs], inits: list[dict[str, Any]], tmp_path: Path
) -> None:
    address, _ = gcs
    config = BatonConfig.from_dict({"ray": {"address": address}})
    with pytest.raises(ConfigError, match="no token of the Ray cluster"):
        connect(config, lambda line: None)
    (tmp_path / "token").write_text("another")
    with pytest.raises(ConfigError, match="refuses this machine's token"):
        connect(config, lambda line: None)
    assert inits == []
    (tmp_path / "token").write_text(TOKEN)
    connect(config, lambda line: None)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert [options["address"] for options in inits] == [address]


def test_auto_means_the_cluster_of_this_users_node(
    gcs: tuple[str, FakeGcs], inits: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    config = BatonConfig.from_dict({"ray": {"address": "auto"}})
    monkeypatch.setattr(ray_connection, "published_heads", lambda: [gcs[0]])
    connect(config, lambda line: None)
    assert [options["address"] for options in inits] == [gcs[0]]
    monkeypatch.setattr(ray_connection, "published_heads", lambda: [gcs[0], "10.0.0.1:6379"])
    with pytest.raises(ConfigError, match=r"several clusters; set ray\.address to one of .*10\.0\.0\.1:6379"):
        connect(config, lambda line: None)


def test_a_head_without_authentication_gives_a_warning(gcs: tuple[str, FakeGcs], inits: list[dict[str, Any]]) -> None:
    address, fake = gcs
    fake.token = None
    lines: list[str] = []
    connect(BatonConfig.from_dict({"ray": {"address": address}}), lines.append)
    assert any("anyone who reaches its ports can run code" in line for line in lines)
    assert "RAY_AUTH_MODE" not in os.environ


def test_versions_are_compared_with_the_head(gcs: tuple[str, FakeGcs], monkeypatch: pytest.MonkeyPatch) -> None:
    address, fake = gcs
    head = RayHead(address, TOKEN)
    check_versions(head)  # a head that says nothing is no obstacle
    head.publish_baton()
    fake.values[b"CLUSTER_METADATA"] = b'{"ray_version": "2.60.0", "python_version": "3.12.1"}'
    monkeypatch.setattr(ray_head, "own_versions", lambda: own_versions() | {"Ray": "2.61.0", "Python": "3.12.1"})
    with pytest.raises(ConfigError, match=r"Ray 2\.61\.0 is here, and Ray 2\.60\.0 on the head\. Workers"):
        check_versions(head)


def test_a_head_that_does_not_answer_is_named() -> None:
    head = RayHead("127.0.0.1:1", None)
    assert not head.is_reachable()
    with pytest.raises(WorkerLostError, match=r"No Ray head answers at 127\.0\.0\.1:1.*baton node start"):
        head.check()


def test_a_local_ray_has_the_environment_of_workers_and_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors that need no other one need not wait until Ray has made it."""
    seen: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", {"RAY_worker_niceness": "3", "HOME": str(tmp_path), "RAY_REDIS_ADDRESS": "a:1"})
    monkeypatch.setattr(ray, "init", lambda **options: seen.update(os.environ))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert connect(BatonConfig(), lambda line: None) is not None
    assert seen.items() >= worker_variables().items()
    assert seen["RAY_prestart_worker_first_driver"] == "0"
    assert seen["RAY_worker_niceness"] == "3"
    assert seen["RAY_COLOR_PREFIX"] == "0"
    assert "RAY_REDIS_ADDRESS" not in seen
