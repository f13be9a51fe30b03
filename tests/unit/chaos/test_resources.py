"""What counts as growth of a cluster's processes."""

from __future__ import annotations

import asyncio
import os

import httpx
import psutil
import pytest

from tests.chaos import resources
from tests.chaos.resources import Holdings, MemoryWatch
from tests.chaos.target import Target

MIB = 2**20


def test_files_of_rays_nodes_are_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is replaced on another node takes its sockets there."""
    names = dict.fromkeys(psutil.process_iter(), "raylet raylet")
    [first, second, other] = list(names)[:3]
    names[other] = "ray::RouterActor"
    monkeypatch.setattr(resources, "_name", names.__getitem__)
    before = Holdings({first: 50, second: 47, other: 9}, frozenset())
    after = Holdings({first: 47, second: 50, other: 10}, frozenset())
    excess = after.excess(before)
    assert excess["files in all raylets"] == 0
    assert excess[f"files in ray::RouterActor ({other.pid})"] == 1


def test_the_records_of_a_process_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = MemoryWatch(list, lambda: asyncio.sleep(0, {}), 0.0)
    watch._records[psutil.Process()] = list(range(1000))
    watch._num_rounds = 1000
    [_, own] = watch.growths()
    assert own.samples == list(range(0, 1000, 17))


async def test_the_content_of_kv_caches_is_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_PERIOD_S", 0.001)
    stop, num_asked = asyncio.Event(), 0

    async def kv_bytes() -> dict[int, int]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 6:
            stop.set()
        return {os.getpid(): 0 if num_asked < 4 else 1000 * MIB}

    watch = MemoryWatch(lambda: [os.getpid()], kv_bytes, 0.0)
    await watch.run(stop)
    [_, own] = watch.growths()
    assert own.after_bytes - own.before_bytes == pytest.approx(-1000 * MIB, abs=50 * MIB)


async def test_the_content_of_a_kv_cache_is_its_used_and_cached_blocks() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        figures = {"kv_blocks_total": 8, "kv_blocks_used": 1, "kv_blocks_cached": 2}
        ready = {"state": "ready", "pid": 7, "memory": {"kv": 800}, **figures}
        silent = {"state": "ready", "pid": 8, "memory": {"kv": 800}}
        return httpx.Response(200, json={"pools": {"prefill": {"workers": [ready]}, "decode": {"workers": [silent]}}})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://cluster") as http:
        assert await Target(http, 1).kv_bytes() == {7: 300}
