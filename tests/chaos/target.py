"""The cluster under faults, seen from outside: its endpoint, its workers, and the hosts on which they run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.clocks import Clocks
from tests.namespaces import Host
from tests.running_cluster import is_busy, live_workers
from tests.waiting import until

_POLL_S = 0.05
_SLOW_POLL_S = 0.25
_STATUS_TIMEOUT_S = 30.0
RECOVERY_S = 180.0
"""A pool that is not complete after this time has failed to recover."""


class RecoveryError(Exception):
    """A pool does not become complete."""


@dataclass
class Target:
    """A running cluster.

    Attributes:
        size: of each pool when it is complete.
        hosts: by address, if each worker has a host of its own.
        pids: finds its processes.
        clocks: those of its processes, if they can be set.
    """

    http: httpx.AsyncClient
    size: int
    hosts: Mapping[str, Host] = field(default_factory=dict)
    pids: Callable[[], Sequence[int]] = list
    clocks: Clocks | None = None

    async def workers(self, pool: str | None = None) -> list[dict[str, Any]]:
        """The workers that are not dead. Waits for the next controller if the cluster has lost its own."""
        give_up_s = time.monotonic() + RECOVERY_S
        while True:
            answer = await self.http.get("/admin/status", timeout=_STATUS_TIMEOUT_S)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > give_up_s:
                break
            await asyncio.sleep(_SLOW_POLL_S)
        return live_workers(answer.raise_for_status().json(), pool)

    async def until_complete(self, pool: str, size: int | None = None) -> None:
        """Waits until a pool has as many workers as it should, and all of them are ready.

        Raises:
            RecoveryError: it takes too long.
        """
        workers: list[dict[str, Any]] = []

        async def is_complete() -> bool:
            workers[:] = await self.workers(pool)
            return [worker["state"] for worker in workers] == ["ready"] * (size or self.size)

        try:
            await until(is_complete, RECOVERY_S, _SLOW_POLL_S)
        except TimeoutError:
            raise RecoveryError(f"{pool} is not complete after {RECOVERY_S:g} s: {workers}") from None

    async def scale(self, pool: str, size: int) -> None:
        """Changes the number of a pool's workers, and waits until they are ready."""
        answer = await self.http.post("/admin/scale", json={pool: size}, timeout=_STATUS_TIMEOUT_S)
        answer.raise_for_status()
        await self.until_complete(pool, size)

    def host_of(self, worker: Mapping[str, Any]) -> Host:
        return self.hosts[worker["address"].rsplit(":", 1)[0]]

    async def until_idle(self, timeout_s: float) -> float:
        """Waits until no worker has anything to do, and returns how many seconds that took.

        Raises:
            TimeoutError: some have after ``timeout_s``; the message has their figures.
        """
        begun_s = time.monotonic()
        while busy := [worker for worker in await self.workers() if is_busy(worker)]:
            if time.monotonic() - begun_s > timeout_s:
                raise TimeoutError(f"after {timeout_s:g} s, workers are busy: {busy}")
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - begun_s

    async def kv_bytes(self) -> dict[int, int]:
        """The sizes of the contents of KV caches, by the ids of their workers' processes."""
        return {
            worker["pid"]: worker["memory"]["kv"]
            // worker["kv_blocks_total"]
            * (worker["kv_blocks_used"] + worker["kv_blocks_cached"])
            for worker in await self.workers()
            if worker.keys() >= {"pid", "kv_blocks_total"}  # one that has just joined or left has only one of them
        }

    async def num_leaked_blocks(self) -> int:
        return sum(worker["kv_blocks_leaked"] for worker in await self.workers())
