"""What a worker pool tells its owner."""

from __future__ import annotations

from typing import Protocol

from cluster.registry.workers import WorkerInfo


class PoolListener(Protocol):
    """Receives a pool's changes. The controller implements it and informs the router."""

    async def worker_ready(self, info: WorkerInfo, *, is_outdated: bool = False) -> None:
        """Adds a worker. Raises ``BatonError`` to refuse it.

        Args:
            is_outdated: the worker was taken over, and will be replaced by one with other settings.
        """
        ...

    async def worker_gone(self, worker_id: str) -> None: ...

    async def drain(self, worker_id: str, timeout_s: float) -> None:
        """Returns when no request uses the worker any more, or after ``timeout_s``."""
        ...

    def report(self, text: str) -> None:
        """Passes a line of progress to the user who starts the cluster."""
        ...
