"""Waits until pools are complete, and says which of their workers are not ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from baton.core.errors import BatonError
from cluster.controller.worker_pool import WorkerPool
from cluster.registry.workers import WorkerState

_ASK_AGAIN_S = 0.1
_LEAVING = (WorkerState.DRAINING, WorkerState.DEAD)


async def settle(pools: Mapping[str, WorkerPool], timeout_s: float) -> list[str]:
    """Waits until all workers of the pools are ready and answer, except for those that leave.

    The records alone do not suffice: a worker that has just died counts as ready until its death is noticed.

    Args:
        timeout_s: how long to wait at most. The wait for a pool also ends when its workers repeatedly fail to start.

    Returns:
        What is not ready then, one text for each worker; empty if everything is.
    """
    silent = await asyncio.gather(*(_pool_settles(pool, timeout_s) for pool in pools.values()))
    texts = [text for name, pool in pools.items() for text in _not_ready(name, pool)]
    return texts + [f"{worker_id} does not answer" for ids in silent for worker_id in ids]


async def _pool_settles(pool: WorkerPool, timeout_s: float) -> list[str]:
    """Waits for a pool. Returns the ids of its ready workers that do not answer."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        try:
            await pool.wait_until_ready(give_up_at - time.monotonic())
        except BatonError:
            return []
        ready = pool.ready
        answers = await asyncio.gather(*(member.answers() for member in ready))
        silent = [member.worker_id for member, answer in zip(ready, answers, strict=True) if not answer]
        if not silent or time.monotonic() >= give_up_at:
            return silent
        await asyncio.sleep(_ASK_AGAIN_S)


def _not_ready(name: str, pool: WorkerPool) -> list[str]:
    status = pool.status()
    staying = [worker for worker in status["workers"] if worker["state"] not in _LEAVING]
    texts = [
        f"{worker['id']} is {worker['state']}" + (f" ({worker['reason']})" if worker["reason"] else "")
        for worker in staying
        if worker["state"] != WorkerState.READY
    ]
    num_missing = status["target"] - len(staying)
    return texts + ([f"{name} lacks {num_missing} workers"] if num_missing > 0 else [])
