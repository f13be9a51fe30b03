"""Waits until pools are complete, and says which of their workers are not ready."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from baton.core.errors import BatonError
from cluster.controller.worker_pool import WorkerPool
from cluster.registry.workers import WorkerState

_LEAVING = (WorkerState.DRAINING, WorkerState.DEAD)


async def settle(pools: Mapping[str, WorkerPool], timeout_s: float) -> list[str]:
    """Waits until all workers of the pools are ready, except for those that leave.

    Args:
        timeout_s: how long to wait at most. The wait for a pool also ends when its workers repeatedly fail to start.

    Returns:
        What is not ready then, one text for each worker; empty if everything is.
    """
    await asyncio.gather(*(_pool_settles(pool, timeout_s) for pool in pools.values()))
    return [text for name, pool in pools.items() for text in _not_ready(name, pool)]


async def _pool_settles(pool: WorkerPool, timeout_s: float) -> None:
    try:
        await pool.wait_until_ready(timeout_s)
    except BatonError:
        return


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
