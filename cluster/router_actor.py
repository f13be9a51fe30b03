"""What Ray runs as the router. Whoever asks Ray for it imports this, and not the web framework that it runs on."""

from __future__ import annotations

from typing import Any

from baton.process.garbage import imports_that_stay
from baton.process.without_torch import do_without_torch


class RouterActor:
    """Passes everything on to a :class:`cluster.router_process.RouterHost`, in a process that never loads torch."""

    def __init__(self, config: dict[str, Any], port: int, controller: Any) -> None:
        do_without_torch()
        with imports_that_stay():
            from cluster.router_process import RouterHost

        self._host = RouterHost(config, port, controller)

    async def start(self) -> tuple[str, int]:
        """See :meth:`RouterHost.start`."""
        return await self._host.start()

    async def add_worker(self, info: dict[str, Any]) -> None:
        """See :meth:`RouterHost.add_worker`."""
        await self._host.add_worker(info)

    async def drain_worker(self, worker_id: str, timeout_s: float) -> None:
        """See :meth:`RouterHost.drain_worker`."""
        await self._host.drain_worker(worker_id, timeout_s)

    async def remove_worker(self, worker_id: str) -> None:
        """See :meth:`RouterHost.remove_worker`."""
        await self._host.remove_worker(worker_id)

    async def wait(self) -> None:
        """See :meth:`RouterHost.wait`."""
        await self._host.wait()

    async def stop(self) -> None:
        """See :meth:`RouterHost.stop`."""
        await self._host.stop()
