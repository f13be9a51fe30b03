"""Calls that stay open: only that of the last controller does."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import InternalError
from cluster.losses.open_call import OpenCall
from cluster.worker import worker_host
from cluster.worker.worker_host import WorkerHost
from tests.credentials import SECRET
from tests.waiting import until


async def _fail() -> None:
    raise InternalError("the engine failed")


async def test_a_call_ends_with_its_work() -> None:
    call, ended = OpenCall(), asyncio.Event()
    running = asyncio.create_task(call.run(ended.wait()))
    ended.set()
    await running
    with pytest.raises(InternalError):
        await call.run(_fail())


async def test_a_worker_keeps_only_the_last_of_several_open_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_host, "hide_ungranted_gpus", lambda: None)  # asks Ray
    host = WorkerHost("decode-1", "decode", "module:Role", {}, "127.0.0.1", SECRET)
    calls = []
    for _ in range(3):
        calls.append(asyncio.create_task(host.wait()))
        await until(lambda: all(call.done() for call in calls[:-1]))
    assert not (await asyncio.wait(calls[-1:], timeout=0.01))[0]
    await host.stop()
    await asyncio.gather(*calls)
