"""What ends a node: the end of any of its processes except for Ray's control store, and of its raylet in any way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import ray_constants

from cluster.nodes.node_process import WatchedNode, start_arguments

GCS, RAYLET = ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET


def process(returncode: int | None) -> list[Any]:
    return [SimpleNamespace(process=SimpleNamespace(poll=lambda: returncode, returncode=returncode))]


class Head(WatchedNode):
    """A node with processes that nothing has started."""

    def __init__(self, redis_address: str | None) -> None:
        self._redis_address = redis_address
        self.all_processes = {GCS: process(-9), RAYLET: process(None)}
        self.num_started = 0

    def __del__(self) -> None: ...

    def kill_gcs_server(self, check_alive: bool = True) -> None:
        assert not check_alive
        del self.all_processes[GCS]

    def start_gcs_server(self) -> None:
        self.all_processes[GCS] = process(None)
        self.num_started += 1


@pytest.mark.parametrize(("redis_address", "num_started"), [("127.0.0.1:6390", 1), (None, 0)])
def test_a_dead_gcs_does_not_end_the_head_and_is_started_again_with_redis(
    redis_address: str | None, num_started: int
) -> None:
    head = Head(redis_address)
    assert [head.dead_processes() for _ in range(2)] == [[], []]
    assert head.num_started == num_started
    head.all_processes[RAYLET] = process(-9)
    assert [kind for kind, _ in head.dead_processes()] == [RAYLET]


@pytest.mark.parametrize("status", [0, -15, 15, 143, -9, 1])
def test_a_raylet_ends_the_node_whatever_its_exit_status(status: int) -> None:
    """Ray ignores 0 and SIGTERM, with which a raylet ends when its agents have died."""
    head = Head(None)
    head.all_processes = {RAYLET: process(status)}
    [(kind, ended)] = head.dead_processes()
    assert kind == RAYLET
    assert ended.returncode == (status if status in (-9, 1) else 1)


def test_the_password_of_redis_is_taken_from_the_environment() -> None:
    assert start_arguments(["start"], {}) == ["start"]
    assert start_arguments(["start"], {"RAY_REDIS_PASSWORD": "secret"}) == ["start", "--redis-password=secret"]
