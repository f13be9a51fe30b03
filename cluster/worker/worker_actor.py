"""What Ray runs as a worker. Whoever asks Ray for workers imports this, and not the torch that they run on."""

from __future__ import annotations

from typing import Any

from baton.process.garbage import imports_that_stay


class WorkerActor:
    """Passes everything on to a :class:`cluster.worker.worker_host.WorkerHost`, which takes seconds to import."""

    def __init__(
        self, worker_id: str, pool: str, role_path: str, config: dict[str, Any], bind_host: str | None
    ) -> None:
        with imports_that_stay():
            from cluster.worker.worker_host import WorkerHost

        self._host = WorkerHost(worker_id, pool, role_path, config, bind_host)

    async def start(self) -> dict[str, Any]:
        """See :meth:`WorkerHost.start`."""
        return await self._host.start()

    async def change_role(self, worker_id: str, pool: str, role_path: str) -> dict[str, Any]:
        """See :meth:`WorkerHost.change_role`."""
        return await self._host.change_role(worker_id, pool, role_path)

    async def wait(self) -> None:
        """See :meth:`WorkerHost.wait`."""
        await self._host.wait()

    async def stop(self) -> None:
        """See :meth:`WorkerHost.stop`."""
        await self._host.stop()
