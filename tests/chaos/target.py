"""The cluster under faults, seen from outside: its endpoint, its workers, and the hosts on which they run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.namespaces import Host
from tests.running_cluster import is_busy, live_workers

_POLL_S = 0.05
_STATUS_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Target:
    """A running cluster.

    Attributes:
        size: of each pool when it is complete.
        hosts: by address, if each worker has a host of its own.
    """

    http: httpx.AsyncClient
    size: int
    hosts: Mapping[str, Host] = field(default_factory=dict)

    async def workers(self, pool: str | None = None) -> list[dict[str, Any]]:
        """The workers that are not dead."""
        answer = await self.http.get("/admin/status", timeout=_STATUS_TIMEOUT_S)
        return live_workers(answer.raise_for_status().json(), pool)

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

    async def num_leaked_blocks(self) -> int:
        return sum(worker["kv_blocks_leaked"] for worker in await self.workers())
