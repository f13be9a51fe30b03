"""How the loss of Ray's control store is noticed and told."""

from __future__ import annotations

import socket

import grpc.aio
import pytest

from baton.core.errors import WorkerLostError
from cluster.losses import gcs_watch
from cluster.losses.gcs_watch import GcsWatch, gcs_answers
from tests.fake_clock import FakeClock


class Watched:
    """A watch over a control store that answers as a test sets it."""

    def __init__(self) -> None:
        self.is_there = True
        self.clock = FakeClock()
        self.told: list[str] = []
        self.ends: list[WorkerLostError] = []
        self.watch = GcsWatch("head:6379", self.told.append, self.ends.append, self._answers, self.clock)

    async def _answers(self, address: str) -> bool:
        return self.is_there

    async def look_after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        await self.watch.look()


async def test_loss_and_return_are_told_once() -> None:
    watched = Watched()
    await watched.look_after(1)
    watched.is_there = False
    for _ in range(3):
        await watched.look_after(2)
    watched.is_there = True
    for _ in range(2):
        await watched.look_after(2)
    lost, back = watched.told
    assert "(GCS) at head:6379 does not answer. Requests are served" in lost
    assert "ends in 45 s unless it comes back" in lost
    assert back.endswith("is back after 6 s")
    assert watched.ends == []


async def test_a_loss_that_lasts_ends_the_cluster_before_ray_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "100")
    watched = Watched()
    watched.is_there = False
    for seconds in (1, 74, 1):
        await watched.look_after(seconds)
    [error] = watched.ends
    assert "has not answered for 75 s" in error.message
    assert "docs/failures.md" in error.message


async def test_a_frozen_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_watch, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel accepts connections for it
        assert not await gcs_answers(f"127.0.0.1:{frozen.getsockname()[1]}")


async def test_a_store_that_lives_answers() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert await gcs_answers(f"127.0.0.1:{port}")
    await server.stop(0)
    assert not await gcs_answers(f"127.0.0.1:{port}")
