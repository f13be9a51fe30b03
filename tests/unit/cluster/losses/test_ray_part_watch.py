"""How the loss of a process of Ray is noticed and told."""

from __future__ import annotations

import socket

import grpc.aio
import pytest

from baton.core.errors import WorkerLostError
from cluster.losses import ray_part_watch
from cluster.losses.ray_part_watch import RayPart, RayPartWatch, Reply, ask_part, gcs_part, raylet_part
from tests.fake_clock import FakeClock


class Watched:
    """A watch over a control store that answers as a test sets it."""

    def __init__(self, part: RayPart | None = None) -> None:
        self.is_there = True
        self.silence = Reply.REFUSES
        self.clock = FakeClock()
        self.told: list[str] = []
        self.ends: list[WorkerLostError] = []
        part = part or gcs_part("head:6379")
        self.watch = RayPartWatch(part, self.told.append, self.ends.append, self._ask, self.clock)

    async def _ask(self, address: str) -> Reply:
        return Reply.ANSWERS if self.is_there else self.silence

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
    assert "(GCS) at head:6379 does not answer. What runs goes on, but no process can start" in lost
    assert "ends in 45 s unless it comes back" in lost
    assert back.endswith("is back after 6 s")
    assert watched.ends == []


async def test_a_loss_that_lasts_ends_the_cluster_before_ray_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "100")
    watched = Watched()
    watched.is_there = False
    for seconds in (1, *[6] * 12, 3):
        await watched.look_after(seconds)
    [error] = watched.ends
    assert "has not answered for 75 s" in error.message
    assert "docs/failures.md" in error.message


async def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    watched = Watched()
    watched.is_there = False
    await watched.look_after(1)
    await watched.look_after(500)
    assert watched.ends == []


async def test_a_late_answer_is_in_doubt_before_it_is_a_loss() -> None:
    watched, doubts = Watched(), []

    async def answer_late(address: str) -> Reply:
        for _ in range(3):
            doubts.append(watched.watch.is_in_doubt)
            watched.clock.now_s += 0.5
        return Reply.ANSWERS

    watched.watch._ask = answer_late
    await watched.look_after(1)
    assert doubts == [False, False, True]
    assert not watched.watch.is_in_doubt
    assert watched.told == []


@pytest.mark.parametrize("silence", [Reply.REFUSES, Reply.SILENT])
async def test_a_raylet_that_has_ended_does_not_come_back(silence: Reply) -> None:
    watched = Watched(raylet_part("10.0.0.1:6380"))
    watched.is_there, watched.silence = False, silence
    await watched.look_after(1)
    if silence is Reply.REFUSES:
        [error] = watched.ends
        assert error.message == (
            "Ray's raylet at 10.0.0.1:6380 has ended, and all on this node with it. Start the cluster again."
        )
        assert watched.told == []
    else:
        assert watched.ends == []
        assert len(watched.told) == 1


def test_a_raylet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "100")  # is not about raylets
    part = raylet_part("10.0.0.1:6380")
    assert (str(part), part.ends_after_s) == ("Ray's raylet at 10.0.0.1:6380", 45.0)


async def test_a_frozen_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_part_watch, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel accepts connections for it
        assert await ask_part(f"127.0.0.1:{frozen.getsockname()[1]}") is Reply.SILENT


async def test_a_store_that_lives_answers() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert await ask_part(f"127.0.0.1:{port}") is Reply.ANSWERS
    await server.stop(0)
    assert await ask_part(f"127.0.0.1:{port}") is Reply.REFUSES
